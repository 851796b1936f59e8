"""What came of ranks and nodes, and what they wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distributor.values.placement import Placement


@dataclass(frozen=True)
class Failure:
    """Why one rank failed.

    Attributes:
        rank, local_rank, host: where.
        kind: the exception's type (``"ValueError"``), ``"exit"`` or ``"signal"``.
        message: one line: ``"ValueError: learning rate must be positive"``, ``"exited with code 3"``.
        traceback: the rank's own traceback, ``""`` without one.
        exit_code, signal: how its process ended; ``None`` where it does not apply.
        time: seconds since the epoch, by the clock of its host.
        log_tail: the last lines it wrote.
        exception: the pickled exception, ``None`` if it could not be pickled.
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


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    ``state`` is ``"finished"``, ``"failed"``, ``"stopped"`` (by us, since something else failed or the run was
    cancelled), or ``"unreturned"``: it finished, but its value could not be pickled (``failure`` says why).
    ``called`` and ``returned`` are when its function, script or module began and ended, in seconds since the epoch.
    """

    rank: int
    host: str
    state: Literal["finished", "failed", "stopped", "unreturned"]
    failure: Failure | None = None
    called: float | None = None
    returned: float | None = None


@dataclass(frozen=True)
class NodeReport:
    """What one node sends back in band: an outcome per rank, or why it never had any.

    ``error`` is ``(class name in distributor.errors, message)``. ``times`` are seconds since the epoch by name.
    ``warnings`` are for the driver to show; ``gave_up`` says why the node stopped its ranks by itself. ``placement`` is
    that of the whole run, for a driver that was never reached.
    """

    node_rank: int
    host: str
    outcomes: tuple[Outcome, ...] = ()
    error: tuple[str, str] | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    gave_up: str | None = None
    placement: Placement | None = None


#: The stream of what Python prints of an exception that nobody caught.
UNCAUGHT = 3


@dataclass(frozen=True)
class Log:
    """A piece of a rank's output: ``offset`` is where it stands in all that the rank wrote to that stream."""

    rank: int
    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Collected:
    """What a scheduler brings back in band.

    Attributes:
        reports: of the nodes.
        values: pickled return values in pieces, by rank.
        lost_hosts: where nodes are that never reported.
        logs: output of ranks that did not come over the channel.
        times: what the scheduler knows of moments of the run, in seconds since the epoch.
    """

    reports: tuple[NodeReport, ...] = ()
    values: Mapping[int, Sequence[bytes]] = field(default_factory=dict, repr=False)
    lost_hosts: tuple[str, ...] = ()
    logs: tuple[Log, ...] = field(default=(), repr=False)
    times: Mapping[str, float] = field(default_factory=dict)
