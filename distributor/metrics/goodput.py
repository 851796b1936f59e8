"""Computes how a run has spent its time: on training, starting, saving, and so on."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

from distributor.text.wording import duration


@dataclass
class Moments:
    """When an attempt reached each phase, in seconds on the driver's clock."""

    began: float
    starting: float | None = None  # the first node was up
    running: float | None = None  # all ranks were up
    stopping: float | None = None  # the driver began to stop the ranks


@dataclass
class Course:
    """The progress of an attempt: steps that a rank has reported, saved in a committed checkpoint, or stopped at."""

    step: int | None = None  # the last one
    first: float | None = None  # when the first one was reached, in seconds on the driver's clock
    passed: float | None = None  # the same for the first one later than all steps of earlier attempts
    saving: float = 0.0  # seconds of rank 0 in ``save_checkpoint`` and ``checkpoint_folder``
    loading: float = 0.0  # seconds of rank 0 in ``load_checkpoint``
    saved: int | None = None  # the last step in a committed checkpoint
    data: float = 0.0  # seconds for which rank 0 waited for a batch of ``runtime.dataset``

    def note(self, step: int, time: float, before: int | None) -> None:
        """Record a step that was reached at ``time``. ``before`` is the last step of all earlier attempts, if any."""
        self.step = step if self.step is None else max(step, self.step)
        if self.first is None:
            self.first, self.data = time, 0.0  # the wait for the first batch is part of the start
        if self.passed is None and (before is None or step > before):
            self.passed = time


@dataclass(frozen=True)
class Goodput:
    """How a run, or one attempt of it, has spent its time, in seconds. The attributes add up to the whole time.

    Attributes:
        training: time in steps that no earlier attempt had done.
        waiting: time until the first node of each attempt was up, including the wait for slots.
        starting: time from the end of ``waiting`` until the first step of each attempt, without ``loading``.
        loading: time that rank 0 spent in ``runtime.load_checkpoint``.
        saving: time that rank 0 spent in ``runtime.save_checkpoint`` and ``runtime.checkpoint_folder``.
        data: time for which rank 0 waited for batches of ``runtime.dataset(...).loader(...)``.
        redoing: time in steps that an earlier attempt had done, but whose results were lost when that attempt failed.
        stalled: time without activity of any rank, before ``stall_timeout`` ended an attempt.
        stopping: time from the failure or cancellation of an attempt until the attempt had ended.

    Example:
        >>> print(Goodput(training=90.0, starting=8.0, saving=2.0))
        90 % of 1 min 40 s in training; starting 8.0 s, saving 2.0 s
    """

    training: float = 0.0
    waiting: float = 0.0
    starting: float = 0.0
    loading: float = 0.0
    saving: float = 0.0
    data: float = 0.0
    redoing: float = 0.0
    stalled: float = 0.0
    stopping: float = 0.0

    @property
    def total(self) -> float:
        """The whole time of the run or attempt, in seconds: the sum of ``training`` and all other attributes."""
        return sum(self._parts())

    @property
    def share(self) -> float:
        """The share of the whole time (``total``) that went into training, from 0 to 1."""
        return self.training / self.total if self.total else 0.0

    def __add__(self, other: Goodput) -> Goodput:
        return Goodput(*map(sum, zip(self._parts(), other._parts())))

    def __str__(self) -> str:
        rest = zip([each.name for each in fields(self)], self._parts())
        told = ", ".join(f"{name} {duration(each)}" for name, each in rest if name != "training" and each >= 0.05)
        return f"{100 * self.share:.0f} % of {duration(self.total)} in training{told and f'; {told}'}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the sentence of ``str`` as the value of a notebook's cell."""
        printer.text(str(self))

    def _parts(self) -> tuple[float, ...]:
        return astuple(self)


def goodput(moments: Moments, course: Course, now: float, *, stall: float = 0.0) -> Goodput:
    """Return how one attempt has spent its time until ``now``. ``stall`` is how long the stall took that ended it.

    >>> told = Course(30, 20.0, 24.0, saving=1.0, loading=2.0)
    >>> print(goodput(Moments(0.0, 5.0, 10.0, 50.0), told, 50.0))
    50 % of 50 s in training; waiting 5.0 s, starting 13 s, loading 2.0 s, saving 1.0 s, redoing 4.0 s
    """
    stop = _between(moments.began, moments.stopping, now)
    start = _between(moments.began, moments.starting, stop)
    up = _between(start, moments.running, stop)
    first = up
    if course.first is not None:  # known at the run's end even if no node reaches the driver
        first = _between(moments.began if moments.running is None else up, course.first, stop)
        start = min(start, first)
    loading, saving = min(course.loading, first - start), min(course.saving, stop - first)
    data = min(course.data, stop - first - saving)
    left = stop - first - saving - data
    redone = 0.0
    if course.first is not None:
        redone = left if course.passed is None else min(left, max(0.0, course.passed - course.first))
    stalled = min(stall, left - redone)
    return Goodput(
        training=left - redone - stalled,
        waiting=start - moments.began,
        starting=first - start - loading,
        loading=loading,
        saving=saving,
        data=data,
        redoing=redone,
        stalled=stalled,
        stopping=now - stop,
    )


def _between(least: float, moment: float | None, most: float) -> float:
    return most if moment is None else min(max(least, moment), most)
