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
    """The outcome of one rank. ``stopped`` is by this package; ``unreturned`` is finished, but without its value."""

    rank: int
    host: str
    state: Literal["finished", "failed", "stopped", "unreturned"]
    failure: Failure | None = None  # of the rank, or of pickling or writing its value
    called: float | None = None  # when the target began, in seconds since the epoch
    returned: float | None = None  # None: it did not return
    alone: str | None = None  # the framework of a rank that trained without the others, or "torch"
    halted: int | None = None  # the step at which runtime.should_stop told the rank to stop


@dataclass(frozen=True)
class Ending:
    """A rank's own report on how it ended."""

    outcome: Outcome
    moment: float  # of time.monotonic(), which all processes of the host share
    value: bytes | None = field(default=None, repr=False)  # pickled, if small: a larger one is in a file
    known: Literal["type", "text", "all"] = "all"  # of an exception: first its type, then its text, then its pickle too


@dataclass(frozen=True)
class NodeReport:
    """What a node reports *in band*, as a result of the scheduler's job: it arrives even if the channel is broken."""

    node_rank: int
    host: str
    outcomes: tuple[Outcome, ...] = ()
    error: tuple[str, str] | None = None  # class name in distributor.errors, and text, of the node's own error
    times: Mapping[str, float] = field(default_factory=dict)  # of events on the node, in seconds since the epoch
    warnings: tuple[str, ...] = ()
    gave_up: str | None = None  # why the node stopped its ranks without an order from the driver
    placement: Placement | None = None  # the driver's only source if no node reached it over the channel
    passed: bool = False  # all ranks of the run succeeded, and it was not stopped: return values come along


#: The number of the stream with the text that Python prints for an uncaught exception.
UNCAUGHT = 3

#: The number of the stream with a rank's reports.
REPORTS = 4


@dataclass(frozen=True)
class Log:
    """A piece of what a rank wrote to one stream, such as stdout (stream 1)."""

    rank: int
    stream: int
    offset: int  # of the first byte of data in the stream
    data: bytes


@dataclass(frozen=True)
class Collected:
    """The results that reach the driver in band or, if Spark or an agent fails after training, over the channel."""

    reports: tuple[NodeReport, ...] = ()
    values: Mapping[int, Sequence[bytes | memoryview]] = field(default_factory=dict, repr=False)  # pickled, by rank
    lost_hosts: tuple[str, ...] = ()  # of nodes that never reported
    logs: tuple[Log, ...] = field(default=(), repr=False)  # reports and output that the channel did not bring
    times: Mapping[str, float] = field(default_factory=dict)  # of the scheduler's events, in seconds since the epoch
    files: tuple[Brought, ...] = field(default=(), repr=False)  # that the channel did not bring

    @property
    def halted(self) -> dict[int, int]:
        """The step at which ``runtime.should_stop`` told each rank to stop, by rank."""
        return {o.rank: o.halted for report in self.reports for o in report.outcomes if o.halted is not None}
