"""Describes for users how the attempts of a run ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distributor.errors import RunCancelledError
from distributor.metrics.goodput import Goodput

_MOST = 10  # earlier attempts that an error lists: the first one and the last ones


@dataclass(frozen=True)
class EndedAttempt:
    """An attempt that has ended.

    Attributes:
        number: the attempt's number, from 0.
        seconds: how long the attempt took.
        reason: why the attempt ended, in one line; ``None`` if it succeeded.
        step: the last step that a rank has reported, saved in a committed checkpoint, or stopped at because
            ``runtime.should_stop`` told it to; ``None`` if there is no such step.
        goodput: how the attempt spent its time.
        executor: the executor on which the attempt failed, if the executor's host may be at fault (a node was lost, or
            a rank was killed by a signal); otherwise ``None``. New jobs of the run avoid a host on which two attempts
            failed.
    """

    number: int
    seconds: float
    reason: str | None
    step: int | None = None
    goodput: Goodput = field(default_factory=Goodput)
    executor: str | None = None

    def __str__(self) -> str:
        """Return how the attempt ended, in one line.

        >>> print(EndedAttempt(0, 12.34, "rank 1 failed: killed by SIGKILL", 40))
        attempt 0, 12.3 s, last step 40: rank 1 failed: killed by SIGKILL
        """
        reached = "" if self.step is None else f", last step {self.step}"
        return f"attempt {self.number}, {self.seconds:.1f} s{reached}: {self.reason or 'it succeeded'}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the line of ``str`` as the value of a notebook's cell."""
        printer.text(str(self))


def add_history(error: BaseException, earlier: Sequence[EndedAttempt], *, stuck: bool) -> None:
    """Add earlier attempts to an error's text; ``stuck`` if the last ones reached no later step than those before."""
    if not earlier or isinstance(error, RunCancelledError):
        return
    shown = [*earlier[:1], *earlier[1:][-_MOST + 1 :]]
    lines = [f"  {each}" for each in shown]
    if len(shown) < len(earlier):
        lines.insert(1, "  ...")
    history = "\n".join(["Earlier attempts:", *lines])
    if stuck:
        history += "\nThe last three attempts reached no later step than those before, so no other attempt was made."
    error.args = (f"{error}\n\n{history}", *error.args[1:])
