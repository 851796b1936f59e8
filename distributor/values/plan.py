"""What one node does: the plan, and the orders that carry it from process to process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distributor.values.job import Job, Target
from distributor.values.placement import Node, Placement


@dataclass(frozen=True)
class Site:
    """Where a plan is made: all that is known of one node of a run.

    Attributes:
        job: what is asked.
        placement: who runs where.
        node: the node to plan for.
        base_env: the environment that its task has; decides only what the user has already set there.
        sockets: variables that say over which network interface ranks talk.
        folder: the node's private folder, where its ranks find files.
    """

    job: Job
    placement: Placement
    node: Node
    base_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    sockets: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True)
class Call:
    """A function of this package by name, and its keyword arguments; it gets ``local_rank`` beside them."""

    module: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What one node will do, decided without side effects.

    Attributes:
        node: the node's part of the placement.
        target: what each rank runs.
        node_env: environment of the process that starts the ranks, on top of the task's own
            (``None`` removes a variable).
        rank_env: environment of each local rank, on top of ``node_env``.
        files: what ranks find in the node's private folder, by name.
        elsewhere: paths that ranks leave behind, and that are removed in the end.
        first: what each rank calls before it runs the target.
        keep_memory: whether the C library keeps memory that ranks free, for their next step.
    """

    node: Node
    target: Target
    node_env: Mapping[str, str | None] = field(repr=False)
    rank_env: tuple[Mapping[str, str], ...] = field(repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    elsewhere: tuple[str, ...] = ()
    first: Call | None = None
    keep_memory: bool = False


@dataclass(frozen=True)
class NodeOrder:
    """What an agent tells its launcher and the ranks forked from it.

    Attributes:
        store_fd: listening socket for the rendezvous store, on node 0.
        event_fd: pipe for events to the agent.
        folder: the node's private folder: log files and outcomes.
        cwd: the ranks' current directory, ``None`` to stay.
        sys_path: their import path, in order.
        collect_all: whether ranks other than 0 send their value back.
        start_method: how ranks are started, as in :class:`Job`.
        root: where this package can be imported from.
        environ: the launcher's whole environment.
    """

    run_id: str
    plan: Plan
    placement: Placement
    grace_period: float
    start_timeout: float
    store_fd: int | None
    event_fd: int
    folder: str
    cwd: str | None
    sys_path: tuple[str, ...]
    collect_all: bool
    start_method: Literal["fork", "spawn"]
    root: str
    environ: Mapping[str, str] = field(repr=False)

    @property
    def host(self) -> str:
        return self.plan.node.host


@dataclass(frozen=True)
class Endpoint:
    """Where the driver listens. ``certificate`` (PEM) is the only one that nodes accept, ``token`` what they show."""

    host: str
    port: int
    certificate: str = field(repr=False)
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class AgentOrder:
    """What the owner of an agent asks of it; travels as a dict of plain values over the control line.

    Attributes:
        job: the pickled :class:`~distributor.values.job.Job`.
        parts: of the job, which travelled by themselves.
        executor: which of the executors in ``facts`` this node is.
        facts: the facts of all tasks, as dicts.
        folder: the node's private folder, which the agent removes in the end.
        root: where this package can be imported from.
        sys_path: import path of the owner.
        endpoint: where the driver listens, ``None`` if the channel is an inherited socket or there is none.
        on_driver: this is the driver's machine: scripts and folders are used where they are.
        reached: the driver has been reached from here in this run.
        times: seconds since the epoch by name, of what was before the agent.
        note: what is to be told to the user.
    """

    job: bytes = field(repr=False)
    executor: str
    facts: list[dict[str, Any]]
    folder: str
    root: str
    sys_path: list[str]
    endpoint: tuple[str, int, str, bytes] | None = field(repr=False)
    on_driver: bool
    reached: bool = False
    times: dict[str, float] = field(default_factory=dict)
    note: str | None = None
    parts: dict[str, bytes] = field(default_factory=dict, repr=False)
