"""The values that cross boundaries: what is asked (Job), where it runs (Placement), how (Plan), what came (Outcome).

Frozen, without behaviour beyond derived properties, and without imports of the rest of the package.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Function:
    """A callable with its arguments, pickled on the driver."""

    name: str
    pickled: bytes = field(repr=False)


@dataclass(frozen=True)
class Script:
    """A ``.py`` file of the driver; its text travels with the job.

    ``path`` is the file's path on the driver: ranks on the driver's own machine run it there, other nodes run a copy.
    ``inside`` is its path relative to the shipped working directory, if it lies in there.
    """

    path: str
    source: bytes = field(repr=False)
    argv: tuple[str, ...] = ()
    inside: str | None = None


@dataclass(frozen=True)
class Module:
    """A module to run as ``python -m name argv...`` would."""

    name: str
    argv: tuple[str, ...] = ()


Target = Function | Script | Module


@dataclass(frozen=True)
class WorkingDir:
    """A project folder: used in place on the driver's machine, unpacked from ``archive`` (zip bytes) elsewhere."""

    path: str
    archive: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Resources:
    """What is asked for each process; ``None`` where nothing is said.

    Attributes:
        num_processes: world size.
        use_gpu: whether processes use GPUs.
        gpus_per_process, cpus_per_process: of each.
        memory_per_process: bytes for each.
        max_processes_per_node: ranks of one node at most.
    """

    num_processes: int
    use_gpu: bool
    gpus_per_process: int | None = None
    cpus_per_process: int | None = None
    memory_per_process: int | None = None
    max_processes_per_node: int | None = None


@dataclass(frozen=True)
class DeepspeedOptions:
    """What the DeepSpeed launch path needs to know.

    Attributes:
        config: the final configuration as JSON, with which ``deepspeed.initialize`` is called; ``None`` without one.
        given: the same with every "auto" that a library may fill from what it knows of the training later on.
        stage: ZeRO stage in it.
        precision: ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        extensions: builders of the extensions in C++ or CUDA that it loads.
        extensions_timeout: seconds that ranks of a node wait for the one that builds them.
        script_arguments: scripts and modules get ``--deepspeed --deepspeed_config PATH``.
    """

    config: str | None = None
    given: str | None = None
    stage: int = 0
    precision: str = "fp32"
    extensions: tuple[str, ...] = ()
    extensions_timeout: float = 600.0
    script_arguments: bool = True


@dataclass(frozen=True)
class TaskProfile:
    """CPUs and GPUs of each Spark task of a run, where they are not what the session gives by itself."""

    cpus: int
    gpus: int = 0


@dataclass(frozen=True)
class Job:
    """What is asked for: the same value for the local and the Spark scheduler.

    Attributes:
        run_id: unique identifier of the run.
        num_processes: world size.
        target: what each rank runs.
        use_gpu: each rank gets one GPU; otherwise GPUs are hidden from ranks.
        ranks_per_task: ranks of one Spark task.
        task_profile: what Spark is asked for each task; ``None``: what the session gives by itself.
        gpus_per_process: GPUs of one rank, where it uses any.
        cpus_per_process: CPUs of one rank in local mode; ``None``: its share of the machine's.
        max_processes_per_node: ranks of one node at most; ``None``: any number.
        spark_cpus: ``spark.task.cpus``, to which Spark sets OMP_NUM_THREADS for its workers whatever CPUs their tasks
            have; ``None`` if it does not.
        versions: of Python and torch on the driver.
        env: environment variables for the ranks, the user's word over everything else. Never shown in ``repr``.
        working_dir: project folder that becomes the ranks' current directory.
        grace_period: seconds between SIGTERM and SIGKILL when ranks are stopped.
        start_timeout: seconds the run may take to bring all ranks up.
        heartbeat_timeout: seconds of silence after which driver and node give each other up.
        stall_timeout: seconds without a sign of life from the ranks that end the run; ``None``: any number.
        log_ranks: whose lines the driver shows; ``None`` for all.
        keep_logs: the driver keeps every rank's output in files, so all of it has to come.
        driver_ports: first and last port the driver may listen on; ``None`` for any free one.
        start_method: ``"fork"``: ranks are forks of a process that has imported torch; ``"spawn"``: started anew.
        keep_warm: seconds that such a process waits for the next run; 0: it serves this run only.
        preload: modules that it imports beside torch.
        launch_path: name of the launch path, a key of ``distributor.launch.PATHS``.
        deepspeed: what that named ``"deepspeed"`` needs to know.
        collect: whose return values travel back.
        name: the user's name for the run; ``None``: it has none.
    """

    run_id: str
    num_processes: int
    target: Target
    use_gpu: bool
    ranks_per_task: int = 1
    task_profile: TaskProfile | None = None
    gpus_per_process: int = 1
    cpus_per_process: int | None = None
    max_processes_per_node: int | None = None
    spark_cpus: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    working_dir: WorkingDir | None = None
    grace_period: float = 10.0
    start_timeout: float = 600.0
    heartbeat_timeout: float = 30.0
    stall_timeout: float | None = None
    log_ranks: tuple[int, ...] | None = None
    keep_logs: bool = False
    driver_ports: tuple[int, int] | None = None
    start_method: Literal["fork", "spawn"] = "fork"
    keep_warm: float = 600.0
    preload: tuple[str, ...] = ()
    launch_path: str = "torchrun"
    deepspeed: DeepspeedOptions | None = None
    collect: Literal["rank0", "all"] = "rank0"
    name: str | None = None

    @property
    def num_tasks(self) -> int:
        return self.num_processes // self.ranks_per_task

    @property
    def label(self) -> str:
        """The run for people: its name, if it has one, and its identifier."""
        return self.run_id if self.name is None else f"{self.name} ({self.run_id})"

    @property
    def title(self) -> str:
        """What is run, for people."""
        return self.target.path if isinstance(self.target, Script) else self.target.name


class Step(NamedTuple):
    """What a run does before its ranks are up.

    ``what`` stays the same for as long as the step lasts, ``how_far`` says how far it is.
    """

    what: str
    how_far: str = ""

    def __str__(self) -> str:
        return self.what + self.how_far


class Status(enum.Enum):
    """Where a run stands."""

    WAITING = "waiting"
    """for slots, and for its nodes to come up"""
    STARTING = "starting"
    """all nodes are there, ranks are on their way"""
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class NodeFacts:
    """What one task knows of itself before anything is decided. Local mode states the same facts for its node(s).

    Attributes:
        partition: index of the barrier task.
        executor: name of its executor; tasks with the same name share a node.
        host: name of the machine, for people.
        address: IP address under which other nodes reach it.
        port: port of a listening socket the task holds (the store's, if this node becomes node 0).
        gpus: addresses of the GPUs that Spark gave to this task, or that local mode found.
        visible_devices: the visible-devices setting already present there, ``None`` if unset.
        cpus: CPUs of the task; in local mode, a rank's share of those of the machine.
        versions: of Python and torch there.
        machine: where device numbers mean the same devices: one machine, or one container. ``""``: nowhere else.
    """

    partition: int
    executor: str
    host: str
    address: str
    port: int
    gpus: tuple[str, ...] = ()
    visible_devices: str | None = None
    cpus: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> NodeFacts:
        return cls(**{**fields, "gpus": tuple(fields["gpus"])})


@dataclass(frozen=True)
class Node:
    """One executor (or this machine): a contiguous block of ranks under one agent.

    ``leader`` is the partition whose task runs the agent; ``task_cpus`` are the CPUs of one task. ``gpus`` are in the
    order in which ranks see them: first one of each rank, then the second of each, so that the one whose index is its
    ``LOCAL_RANK`` is a rank's own, and all its own are every ``local_world_size``-th from there.
    """

    node_rank: int
    executor: str
    host: str
    address: str
    port: int
    leader: int
    first_rank: int
    local_world_size: int
    gpus: tuple[str, ...] = ()
    task_cpus: int = 1

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.local_world_size)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Node:
        return cls(**{**fields, "gpus": tuple(fields["gpus"])})


@dataclass(frozen=True)
class Placement:
    """Who runs where: the nodes in node-rank order. The same value on every node."""

    nodes: tuple[Node, ...]

    @property
    def world_size(self) -> int:
        return sum(node.local_world_size for node in self.nodes)

    @property
    def master(self) -> Node:
        return self.nodes[0]

    def node_of(self, executor: str) -> Node:
        """The node that an executor is."""
        return next(node for node in self.nodes if node.executor == executor)

    def host_of(self, rank: int) -> str:
        """The name of the machine of a rank, ``"?"`` for a rank that there is not."""
        return next((node.host for node in self.nodes if rank in node.ranks), "?")

    def __str__(self) -> str:
        return "; ".join(
            f"node {n.node_rank} on {n.host} ({n.address}): "
            + (f"rank {n.first_rank}" if n.local_world_size == 1 else f"ranks {n.ranks.start}-{n.ranks.stop - 1}")
            + (f", GPUs {','.join(n.gpus)}" if n.gpus else "")
            for n in self.nodes
        )


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
        extensions: builders of DeepSpeed's extensions that ranks load before they run the target; ``None`` without
            DeepSpeed.
        extensions_timeout: seconds that they wait for the one of them that builds.
        keep_memory: whether the C library keeps memory that ranks free, for their next step.
    """

    node: Node
    target: Target
    node_env: Mapping[str, str | None] = field(repr=False)
    rank_env: tuple[Mapping[str, str], ...] = field(repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    elsewhere: tuple[str, ...] = ()
    extensions: tuple[str, ...] | None = None
    extensions_timeout: float = 600.0
    keep_memory: bool = False


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
