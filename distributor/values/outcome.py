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
        rank, local_rank, host: which rank failed, and on which machine.
        kind: the exception's type (``"ValueError"``), ``"exit"``, ``"signal"``, or ``"lost"`` if it is unknown how the
            rank's process ended.
        message: the reason in one line: ``"ValueError: learning rate must be positive"``, ``"exited with code 3"``.
        traceback: the traceback of the exception in the rank; ``""`` if there is none.
        exit_code, signal: how the rank's process ended; each is ``None`` if it does not apply.
        time: time of the failure in seconds since the epoch, by the driver's clock if the node reported the failure
            when it happened, otherwise by the clock of the rank's host.
        log_tail: the last lines that the rank wrote.
        exception: the pickled exception; ``None`` if there is none, or if it could not be pickled or is too long.
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

    Attributes:
        rank, host: the rank, and the machine on which it ran.
        state: ``"finished"``, ``"failed"``, ``"stopped"`` (by this package, because something else failed or the run
            was cancelled), or ``"unreturned"`` (the rank finished, but its value could not be pickled or written).
        failure: why the rank failed, or why its value could not be pickled or written.
        called, returned: when the rank's function, script or module began, and when it returned, in seconds since the
            epoch. ``returned`` is ``None`` if it did not return.
        alone: if the rank trained without the other ranks, the framework that it used, such as ``"accelerate"``
            (``"torch"`` if it used only torch); otherwise ``None``.
        halted: the step at which ``runtime.should_stop`` told the rank to stop; ``None`` if it did not.
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
    """A rank's own report on how it ended.

    Attributes:
        outcome: how the rank ended.
        moment: when the rank ended, in seconds of ``time.monotonic()``, a clock that all processes of the host share.
        value: the rank's pickled return value if this is small; the rank writes a larger value to a file.
        final: false for the first report on an exception, which the rank makes before it computes the exception's text.
            The final report replaces the first one.
    """

    outcome: Outcome
    moment: float
    value: bytes | None = field(default=None, repr=False)
    final: bool = True


@dataclass(frozen=True)
class NodeReport:
    """The report of one node: the outcome of each rank, and the node's own error, such as a failure to start ranks.

    The node sends its report *in band*, that is, as a result of the scheduler's job, so that the report arrives even if
    the channel (the node's own connection to the driver) is broken.

    Attributes:
        node_rank, host: the node, and its machine.
        outcomes: how each rank ended.
        error: class name (in ``distributor.errors``) and text of the node's error, such as a failure to start ranks;
            ``None`` if there is none.
        times: when events happened on the node, by name, in seconds since the epoch.
        warnings: warnings that the driver shows.
        gave_up: why the node stopped its ranks without an order from the driver; ``None`` if it did not.
        placement: which rank ran where in the whole run. If no node could connect to the driver over the channel, the
            driver learns the placement only from this report.
        passed: whether the ranks of all nodes have succeeded and the run was not stopped. If so, the return values of
            the ranks come with the report.
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
    """A piece of what a rank wrote to one stream, such as stdout (stream 1).

    ``offset`` is the number of bytes that the rank wrote to ``stream`` before the bytes ``data``.
    """

    rank: int
    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Collected:
    """The results that come back to the driver *in band*, that is, as results of the scheduler's job.

    If Spark or an agent fails after training has ended, these may be the results that came over the channel instead.

    Attributes:
        reports: the reports of the nodes, each with the outcomes of the node's ranks.
        values: pickled return values in pieces, by rank.
        lost_hosts: hosts of the nodes that never reported.
        logs: ranks' reports and, if the driver keeps all output, ranks' output that did not arrive over the channel
            (the nodes' own connections to the driver).
        times: times of the events that the scheduler has recorded, by name, in seconds since the epoch.
        files: files that ranks wrote and that did not arrive over the channel.
    """

    reports: tuple[NodeReport, ...] = ()
    values: Mapping[int, Sequence[bytes | memoryview]] = field(default_factory=dict, repr=False)
    lost_hosts: tuple[str, ...] = ()
    logs: tuple[Log, ...] = field(default=(), repr=False)
    times: Mapping[str, float] = field(default_factory=dict)
    files: tuple[Brought, ...] = field(default=(), repr=False)

    @property
    def halted(self) -> dict[int, int]:
        """The step at which ``runtime.should_stop`` told each rank to stop, by rank."""
        return {o.rank: o.halted for report in self.reports for o in report.outcomes if o.halted is not None}
