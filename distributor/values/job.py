"""What is asked for: the job, and what it is made of. Frozen, without behaviour beyond derived properties."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

if TYPE_CHECKING:
    from distributor.values.launch import LaunchPath


class Warmth(TypedDict):
    """What a job asks of warm processes: plain values.

    ``keep`` is how many seconds one stays without a run, ``preload`` what it imports beside torch; ``env`` and
    ``ranks_per_task`` and ``spark_cpus`` are the job's, for the environment in which it imports.
    """

    keep: float
    preload: list[str]
    env: dict[str, str]
    ranks_per_task: int
    spark_cpus: int | None
    use_gpu: bool


def warmth(job: Job) -> Warmth | None:
    """What a job asks of warm processes; ``None`` if it wants none."""
    if job.start_method != "fork" or job.keep_warm == 0:
        return None
    return {
        "keep": job.keep_warm,
        "preload": list(job.preload),
        "env": dict(job.env),
        "ranks_per_task": job.ranks_per_task,
        "spark_cpus": job.spark_cpus,
        "use_gpu": job.use_gpu,
    }


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
        launch: how ranks are started.
        collect: whose return values travel back.
        name: the user's name for the run; ``None``: it has none.
    """

    run_id: str
    num_processes: int
    target: Target
    use_gpu: bool
    launch: LaunchPath = field(kw_only=True)
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
