"""The outcomes of ranks and nodes, and their output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distributor.values.files import Brought
from distributor.values.placement import Placement


@dataclass(frozen=True)
class Failure:
    """The reason why one rank failed.

    Attributes:
        rank, local_rank, host: where it failed.
        kind: the exception's type (``"ValueError"``), ``"exit"``, ``"signal"``, or ``"lost"`` if it is unknown how the
            rank's process ended.
        message: the reason in one line: ``"ValueError: learning rate must be positive"``, ``"exited with code 3"``.
        traceback: the rank's own traceback, ``""`` if there is none.
        exit_code, signal: how the rank's process ended; each is ``None`` if it does not apply.
        time: time of the failure in seconds since the epoch, by the driver's clock if the failure was reported during
            the run, otherwise by the clock of the rank's host.
        log_tail: the last lines that the rank wrote.
        exception: the pickled exception, ``None`` if it could not be pickled or is too long.
        after_stop: whether the rank had been told to stop before it failed.
    """

    rank: int
    local_rank: int
    host: str
    kind: str
    message: str
    traceback: str = ""
    exit_code: int | None = None
    signal: str | None = None
    time: float = 0.0
    log_tail: str = ""
    exception: bytes | None = field(default=None, repr=False)
    after_stop: bool = False


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank.

    ``state`` is ``"finished"``, ``"failed"``, ``"stopped"`` (by this package, because something else failed or the
    run was cancelled), or ``"unreturned"`` (it finished, but its value could not be pickled or written; ``failure``
    says why). ``called`` and ``returned`` are the times when its function, script or module began and ended, in seconds
    since the epoch. If the rank trained without the other ranks, ``alone`` names the framework that it used, or
    ``"torch"`` if it used no framework. ``halted`` is the step at which ``runtime.should_stop`` told it to stop.
    """

    rank: int
    host: str
    state: Literal["finished", "failed", "stopped", "unreturned"]
    failure: Failure | None = None
    called: float | None = None
    returned: float | None = None
    alone: str | None = None
    halted: int | None = None


@dataclass(frozen=True)
class Ending:
    """A rank's own report of how it ended.

    ``moment`` is the time of the end in seconds, on a clock that all processes of the host share
    (``time.monotonic()``). ``value`` is the rank's pickled return value if it is small; a larger value is in a file.
    ``final`` is false while the rank is still preparing its report.
    """

    outcome: Outcome
    moment: float
    value: bytes | None = field(default=None, repr=False)
    final: bool = True


@dataclass(frozen=True)
class NodeReport:
    """The report of one node: the outcome of each rank, or the error that kept the ranks from starting.

    The node sends it in band, that is, through the scheduler's job and not only over the channel. ``error`` is ``(class
    name in distributor.errors, message)``. ``times`` maps names of events to seconds since the epoch. The driver shows
    ``warnings``. ``gave_up`` says why the node stopped its ranks without an order. ``placement`` is the placement of
    the whole run, for a driver that no node could reach. ``passed`` says that the ranks of all nodes have succeeded and
    that the run was not stopped. In this case, the ranks' return values come with the report.
    """

    node_rank: int
    host: str
    outcomes: tuple[Outcome, ...] = ()
    error: tuple[str, str] | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    gave_up: str | None = None
    placement: Placement | None = None
    passed: bool = False


#: The number of the stream with the text that Python prints for an uncaught exception.
UNCAUGHT = 3

#: The number of the stream with a rank's reports; see :mod:`distributor.values.reports`.
REPORTS = 4


@dataclass(frozen=True)
class Log:
    """A piece of a rank's output; ``offset`` is its position in bytes in the whole output to that stream."""

    rank: int
    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Collected:
    """The results that come back in band, through the scheduler's job.

    Attributes:
        reports: the reports of the nodes.
        values: pickled return values in pieces, by rank.
        lost_hosts: hosts of the nodes that never reported.
        logs: output of ranks that did not arrive over the channel.
        times: moments of the run that the scheduler knows, by name, in seconds since the epoch.
        files: new files of ranks that did not arrive over the channel.
    """

    reports: tuple[NodeReport, ...] = ()
    values: Mapping[int, Sequence[bytes | memoryview]] = field(default_factory=dict, repr=False)
    lost_hosts: tuple[str, ...] = ()
    logs: tuple[Log, ...] = field(default=(), repr=False)
    times: Mapping[str, float] = field(default_factory=dict)
    files: tuple[Brought, ...] = field(default=(), repr=False)

    @property
    def halted(self) -> dict[int, int]:
        """The step at which each rank was told to stop, by rank."""
        return {o.rank: o.halted for report in self.reports for o in report.outcomes if o.halted is not None}
