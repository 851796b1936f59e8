"""The plan of one node (what the node does in a run), and the orders to its agent, launcher, ranks and companions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distributor.values.checkpoints import SharedMemory
from distributor.values.job import Job, Target
from distributor.values.placement import Node, Placement


@dataclass(frozen=True)
class Site:
    """Everything known about one node of a run when its plan is made.

    Attributes:
        job: the requested job.
        placement: which rank runs where.
        node: the node to plan for.
        base_env: the environment of the node's task, which shows what the user has already set.
        sockets: environment variables that select the network interface for communication between ranks.
        folder: the node's private folder, where its ranks find files.
        attempt: number of the attempt, counted from 0.
        memory: where in memory the ranks keep the newest states that they save; ``None`` if they keep none there.
    """

    job: Job
    placement: Placement
    node: Node
    base_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    sockets: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    attempt: int = 0
    memory: SharedMemory | None = None


@dataclass(frozen=True)
class Call:
    """The name of a function in ``distributor`` that ranks call, and its keyword arguments.

    Each rank also passes its ``local_rank`` to the function.
    """

    module: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Companion:
    """A process beside the ranks of a node, such as Ray. The agent starts it before the ranks and ends it after them.

    The process calls ``function(**arguments, ready=ready)``. The function calls ``ready()`` when ranks may begin, and
    runs until SIGTERM ends it. If the function ends while ranks run or before it has called ``ready()``, the attempt
    fails.

    Attributes:
        name: the companion's name in errors and in the names of its files. It is unique on the node.
        module: a module of ``distributor``, or any other module that can be imported on the node.
        function: the function of this module that the process calls.
        arguments: the function's keyword arguments.
        environment: environment variables of the process, in addition to the node's.

    Example:
        >>> Companion("head", "distributor.launch.ray.head", "serve", {"port": 6379}).name
        'head'
    """

    name: str
    module: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class CompanionOrder:
    """An agent's order to a companion (a process that runs beside the ranks of a node, such as Ray).

    Attributes:
        companion: the function that the process calls, with its arguments and environment.
        sys_path: the process's import path.
    """

    companion: Companion
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A description of what one node will do, decided without side effects.

    Attributes:
        node: the node's part of the placement.
        target: what each rank runs.
        node_env: environment of the process that starts the ranks, on top of the task's own environment
            (``None`` removes a variable).
        rank_env: environment of each local rank, on top of ``node_env``.
        files: text of the files that ranks find in the node's private folder, by name.
        elsewhere: paths of files and folders that ranks and companions leave behind outside the node's private folder.
            The agent removes them after each attempt.
        first: function that each rank calls before it runs the target.
        last: function that each rank calls after the target has returned and exit callbacks have run.
        keep_memory: whether the C library of ranks keeps freed memory for the next training step.
        companions: processes beside the ranks of this node, such as Ray.
        serving: ranks of the run that serve the other ranks and never end by themselves. They are stopped once all
            other ranks have succeeded, and then count as succeeded. The value is the same on all nodes.
    """

    node: Node
    target: Target
    node_env: Mapping[str, str | None] = field(repr=False)
    rank_env: tuple[Mapping[str, str], ...] = field(repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    elsewhere: tuple[str, ...] = ()
    first: Call | None = None
    last: Call | None = None
    keep_memory: bool = False
    companions: tuple[Companion, ...] = ()
    serving: tuple[int, ...] = ()

    @property
    def serving_here(self) -> frozenset[int]:
        """The local ranks of this node that serve other ranks, such as TensorFlow's parameter servers."""
        return frozenset(rank - self.node.first_rank for rank in self.serving if rank in self.node.ranks)


@dataclass(frozen=True)
class NodeOrder:
    """An agent's order to its launcher and to the ranks that the launcher starts: what they do, and with which files.

    Attributes:
        store_fd: listening socket for the rendezvous store on node 0; ``None`` on other nodes.
        event_fd: pipe for events to the agent.
        spare_fd: socket on which a spare (a fork of the launcher) waits for the order of the next attempt; ``None`` for
            no spare.
        slots_fd: shared memory that ranks use to report how they ended; see :mod:`distributor.channel.rank_slots`.
        folder: the node's private folder, for log files and return values.
        cwd: the ranks' current directory; ``None`` leaves it unchanged.
        sys_path: the ranks' import path, in order.
        collect_all: whether all ranks send their return values to the driver, or only rank 0.
        start_method: how ranks are started, as in :class:`~distributor.values.options.Startup`.
        root: path from which the library itself (``distributor``) can be imported.
        environ: the launcher's whole environment.
        require_group: as in :class:`~distributor.values.options.Training`.
        gpu_check: function that each rank calls first of all. It raises an error if the rank does not see its GPUs.
        check: function that each rank calls next. It raises an error if the run cannot begin.
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
    spare_fd: int | None = None
    slots_fd: int = -1
    require_group: bool | None = None
    gpu_check: Call | None = None
    check: Call | None = None

    @property
    def host(self) -> str:
        return self.plan.node.host


@dataclass(frozen=True)
class Endpoint:
    """The address to which nodes connect to reach the driver.

    Nodes accept only a server with this ``certificate`` (PEM). The driver accepts only connections with the ``token``.
    """

    host: str
    port: int
    certificate: str = field(repr=False)
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class AgentOrder:
    """An order to an agent from its *owner*: the Spark task that starts the agent or, in local mode, the driver.

    The owner sends the order over a private connection, as a dict of the attributes below.

    Attributes:
        job: the pickled :class:`~distributor.values.job.Job`.
        parts: parts of the job that were sent separately, by name.
        executor: the name of this node's executor in ``facts``.
        facts: the facts of all tasks, as dicts of the fields of :class:`~distributor.values.placement.NodeFacts`.
        folder: the node's private folder, which the agent removes at the end.
        root: path from which the library itself (``distributor``) can be imported.
        sys_path: import path of the owner.
        endpoint: where the driver listens; ``None`` if the agent inherits a socket to the driver, or gets no connection
            to it.
        on_driver: whether the run is in local mode, where scripts and folders are used in place. Executors use copies,
            even on the driver's machine.
        reached: whether this node's task has already reached the driver in this run.
        times: when events happened before the agent started, by name, in seconds since the epoch.
        in_place: whether the owner's current directory is also the driver's. If so, ranks' files may stay there.
        note: a warning that the agent passes on to the user, if any.
        secret: the secret that proves to the driver that this agent, or its owner, is the node. On Spark,
            :mod:`distributor.channel.proof` makes it. No rank knows it.
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
    in_place: bool = False
    times: dict[str, float] = field(default_factory=dict)
    note: str | None = None
    parts: dict[str, bytes] = field(default_factory=dict, repr=False)
    secret: str = field(default="", repr=False)
