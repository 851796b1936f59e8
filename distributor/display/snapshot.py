"""The state of a run at one moment, and functions that describe it in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distributor.text.wording import count, duration, who
from distributor.values.job import Status
from distributor.values.placement import Placement
from distributor.values.reports import Progress

_VALUES = 8

_LONGEST = 24  # characters of a list of ranks

_ENDED = (Status.SUCCEEDED, Status.FAILED, Status.CANCELLED)


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment.

    Attributes:
        run_id, title, world_size, name: see :class:`distributor.values.job.Job`.
        status: the status of the run.
        seconds: number of seconds since the run was submitted; once it has ended, the seconds that it took.
        since: number of seconds for which the run has had this status.
        detail: until the ranks are up, what the run is doing, such as waiting for slots; while the run stops, the
            reason for this; ``""`` if there is nothing to say.
        lasting: number of seconds for which the run has done what ``detail`` says; 0 once the ranks are up.
        nodes_up: number of nodes whose ranks have been started.
        ranks_up: number of ranks that are running, as far as nodes have reported.
        placement: which rank runs where, once that is known.
        lines: the last line of each rank that has written one.
        progress: how far the training has come, if ranks report steps.
        metrics: by name, the newest value of each metric in the latest attempt. If several ranks report a metric, only
            the lowest of these ranks counts.
        timings: seconds by phase, once the run has ended.
        error: the exception with which the run ended; ``None`` if there is none.
        raised: whether a caller waits for the run's result. If so, this caller gets ``error`` as an exception.
    """

    run_id: str
    title: str
    world_size: int
    status: Status
    seconds: float = 0.0
    since: float = 0.0
    detail: str = ""
    lasting: float = 0.0
    nodes_up: int = 0
    ranks_up: int = 0
    placement: Placement | None = None
    lines: Mapping[int, str] = field(default_factory=dict)
    progress: Progress | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    error: BaseException | None = None
    raised: bool = False
    name: str | None = None

    @property
    def label(self) -> str:
        """The label of the run in messages: its name, if it has one, and its identifier."""
        return self.run_id if self.name is None else f"{self.name} ({self.run_id})"

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    @property
    def nodes(self) -> int:
        """The number of nodes of the run; 0 until it is known."""
        return 0 if self.placement is None else len(self.placement.nodes)


def state(snapshot: Snapshot) -> str:
    """Describe the status of a run in words, without a time.

    >>> state(Snapshot("3f2a", "train", 4, Status.RUNNING, ranks_up=4))
    'running: 4 of 4 ranks up'
    """
    detail = f": {snapshot.detail}" if snapshot.detail else ""
    if snapshot.status in (Status.WAITING, Status.STARTING):
        return snapshot.detail or "starting"
    if snapshot.status is Status.RUNNING:
        if snapshot.ranks_up == 0:
            return "finishing: all ranks have ended"
        return f"running: {snapshot.ranks_up} of {count(snapshot.world_size, 'rank')} up"
    if snapshot.status is Status.FAILED:
        return f"failed: {reason(snapshot)}"
    return f"stopping{detail}" if snapshot.status is Status.STOPPING else str(snapshot.status.value)


def timed(snapshot: Snapshot) -> str:
    """Describe the status of a run and, until its ranks are up, how long the current step has lasted.

    >>> timed(Snapshot("3f2a", "train", 4, Status.WAITING, detail="importing torch on 2 nodes", lasting=34.2))
    'importing torch on 2 nodes, 34 s'
    """
    return f"{state(snapshot)}, {duration(snapshot.lasting)}" if snapshot.lasting >= 1 else state(snapshot)


def far(progress: Progress) -> str:
    """Describe the progress of the training: the last step, the speed and the time left.

    >>> far(Progress(120, 1000, 12.34))
    'step 120 of 1000, 12.3 steps/s, 1 min 11 s left'
    """
    words = [f"step {progress.step}" if progress.total is None else f"step {progress.step} of {progress.total}"]
    if progress.rate is not None:
        words.append(f"{progress.rate:.3g} steps/s" if progress.rate >= 1 else f"{1 / progress.rate:.3g} s/step")
    if progress.seconds_left:
        words.append(f"{duration(progress.seconds_left)} left")
    return ", ".join(words)


def reported(snapshot: Snapshot) -> str:
    """Describe what ranks have reported last; ``""`` if they have reported nothing.

    >>> reported(Snapshot("3f2a", "train", 4, Status.RUNNING, progress=Progress(7), metrics={"loss": 0.1234567}))
    'step 7, loss 0.1235'
    """
    words = [] if snapshot.progress is None else [far(snapshot.progress)]
    values = list(snapshot.metrics.items())
    words += [f"{name} {value:.4g}" for name, value in values[:_VALUES]]
    if len(values) > _VALUES:
        words.append(f"and {len(values) - _VALUES} more")
    return ", ".join(words)


def reason(snapshot: Snapshot) -> str:
    """Return why a run failed, in one line."""
    return str(snapshot.error).partition("\n")[0] or type(snapshot.error).__name__


def folded(lines: Mapping[int, str], most: int) -> list[tuple[str, str]]:
    """Return last lines as pairs ``(ranks, line)``, equal ones merged. The last of ``most`` is for all other ranks.

    >>> folded({0: "epoch 3", 1: "epoch 3", 2: "epoch 2"}, 4)
    [('ranks 0-1', 'epoch 3'), ('rank 2', 'epoch 2')]
    """
    by_line: dict[str, list[int]] = {}
    for rank in sorted(lines):
        by_line.setdefault(lines[rank], []).append(rank)
    entries = [(_label(ranks), line) for line, ranks in by_line.items()]
    if len(entries) <= most:
        return entries
    rest = sorted(rank for ranks in list(by_line.values())[most - 1 :] for rank in ranks)
    return [*entries[: most - 1], (_label(rest), "...")]


def _label(ranks: list[int]) -> str:
    """Name ranks, not all of many: the line that they have written needs the place."""
    text, named = who(ranks), ranks[:3]
    return text if len(text) <= _LONGEST else f"{who(named)} and {len(ranks) - len(named)} more"
