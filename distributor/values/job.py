"""The job, a user's request to train, and its parts: frozen dataclasses with no behaviour except derived properties."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Literal, NamedTuple, TypedDict

from distributor.values.checkpoints import Checkpoints, PeerKey
from distributor.values.dataset import Dataset
from distributor.values.environment import job_id
from distributor.values.lease_record import FencingToken, Identity
from distributor.values.options import Deadlines, Network, Output, Recovery, Resources, Startup, Training

if TYPE_CHECKING:
    from distributor.values.launch_path import LaunchPath


class Warmth(TypedDict):
    """What a job requires of its warm processes, which import torch once and fork the agents of many runs."""

    keep: float  # seconds that a warm process waits for the next run
    preload: list[str]  # besides torch
    env: dict[str, str]  # this and the fields below give its variables while it imports
    ranks_per_task: int
    spark_cpus: int | None
    use_gpu: bool


def warmth(job: Job) -> Warmth | None:
    """Return a job's requirements for warm processes; ``None`` if it uses none."""
    if job.startup.start_method != "fork" or job.startup.keep_warm == 0:
        return None
    return {
        "keep": job.startup.keep_warm,
        "preload": list(job.preload),
        "env": dict(job.env),
        "ranks_per_task": job.ranks_per_task,
        "spark_cpus": job.spark_cpus,
        "use_gpu": job.resources.use_gpu,
    }


@dataclass(frozen=True)
class Function:
    """A callable with its arguments, pickled on the driver. ``argv`` is what it finds in ``sys.argv[1:]``."""

    name: str
    pickled: bytes | IO[bytes] = field(repr=False)  # a large one is a file without a name, and b"" on nodes
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Script:
    """A Python script on the driver. Its text is sent with the job; executors run a copy."""

    path: str  # on the driver
    source: bytes = field(repr=False)
    argv: tuple[str, ...] = ()
    inside: str | None = None  # relative to working_dir, if the script is there
    piped: bool = False  # only the driver can read path, such as /dev/stdin: local mode runs a copy, too


@dataclass(frozen=True)
class Module:
    """A module to run as ``python -m name argv...`` would."""

    name: str
    argv: tuple[str, ...] = ()


Target = Function | Script | Module


@dataclass(frozen=True)
class WorkingDir:
    """A project folder. In local mode, ranks use the folder itself; executors unpack the zip ``archive``."""

    path: str
    archive: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class OutputDir:
    """The folder or URL to which the files that ranks write are copied."""

    where: str  # a URL, or an absolute path on the driver
    limit: int  # bytes of all files there
    held: int = 0  # bytes of the files that are in the folder before the job; 0 for a URL
    archive: bytes | None = field(default=None, repr=False)  # zip of these files, if sent with the job


@dataclass(frozen=True)
class TaskProfile:
    """Number of CPUs and GPUs of each Spark task of a run, if they differ from the settings of the Spark session."""

    cpus: int
    gpus: float = 0  # below 1: the share of one


class Widths(NamedTuple):
    """The smallest and the largest number of processes that a run may have."""

    least: int
    most: int

    @property
    def fixed(self) -> bool:
        """Whether the number of processes cannot change during the run."""
        return self.least == self.most


@dataclass(frozen=True, kw_only=True)
class Job:
    """One requested job. The local scheduler and the Spark scheduler get the same job.

    Attributes:
        run_id: unique identifier of the run.
        target: what each rank runs.
        launch: how ranks are started.
        resources, deadlines, output, network, startup, training, recovery: the user's options.
        name: the user's name for the run, if it has one.
        ranks_per_task: number of ranks of one Spark task.
        task_profile: resources of each Spark task; ``None`` keeps the settings of the Spark session.
        node_limit: maximum number of ranks on one node; ``None`` for no limit. It follows from the user's limit
            (``max_processes_per_node``) and from the memory that ranks need.
        spark_cpus: the value of ``spark.task.cpus`` if Spark sets ``OMP_NUM_THREADS`` to this value in its workers,
            even if a task has more CPUs; ``None`` if Spark does not.
        versions: versions of Python, torch and the launch path's packages on the driver.
        env: environment variables for the ranks, which override all others except those that the run sets for each
            rank. Never shown in ``repr``.
        working_dir: project folder that becomes the ranks' current directory.
        output_dir: the folder or URL to which files that ranks write are copied; ``None`` if they are not copied.
        checkpoints: where ranks keep checkpoints; ``None`` if the user has named no place.
        data: where ranks read the data that the user has given, by name.
        identity: a description of the training (the target and its arguments), with which a later run of the same name
            is compared; ``None`` for a run without a name or without checkpoints.
        fence: the condition under which ranks may commit a checkpoint: that the run still holds the lease of its name
            or folder, and has begun no later job. ``None`` until the run holds it, and for a run without checkpoints.
        peers: the key with which nodes exchange copies of ranks' states; ``None`` if they exchange none.
        collect: the ranks whose return values the driver gets: only rank 0 (``"rank0"``), or all ranks (``"all"``).
        widths: the smallest and the largest number of processes, if their number may change during the run; ``None`` if
            the number is fixed.
        avoided: hosts (by the names that Spark uses) on each of which at least two attempts of the run have failed.
            Ranks are placed on other hosts if these have room.
        excused: number of earlier attempts that do not count as failed, because ranks were preempted, or were stopped
            so that the run could go on with more ranks. ``recovery.max_restarts`` already includes one additional
            restart for each of them.
        sample_every: seconds between two samples of each node's load; ``None`` if nobody asks for them.
        tracked: MLflow's id of the run if a callback of the driver tracks it there, for the autologging of rank 0;
            empty if no rank is to join it, and ``None`` if no callback tracks it.
        attempt: number of the first attempt that the job's nodes make. It is above 0 if this is not the first job of
            the run.
    """

    run_id: str
    target: Target
    launch: LaunchPath
    resources: Resources
    deadlines: Deadlines
    output: Output
    network: Network
    startup: Startup
    training: Training
    recovery: Recovery = field(default_factory=Recovery)
    name: str | None = None
    ranks_per_task: int = 1
    task_profile: TaskProfile | None = None
    node_limit: int | None = None
    spark_cpus: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    working_dir: WorkingDir | None = None
    output_dir: OutputDir | None = None
    checkpoints: Checkpoints | None = None
    data: Mapping[str, Dataset] = field(default_factory=dict)
    identity: Identity | None = None
    fence: FencingToken | None = None
    peers: PeerKey | None = field(default=None, repr=False)
    collect: Literal["rank0", "all"] = "rank0"
    widths: Widths | None = None
    avoided: tuple[str, ...] = ()
    excused: int = 0
    sample_every: float | None = None
    tracked: str | None = None
    attempt: int = 0

    @property
    def job_id(self) -> str:
        """Identifier of this job among all jobs of all runs."""
        return job_id(self.run_id, self.attempt)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return 1 if self.launch.once else self.resources.num_processes

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks that the run may have."""
        most = self.resources.num_processes if self.widths is None else self.widths.most
        return 1 if self.launch.once else most

    @property
    def num_tasks(self) -> int:
        return self.resources.num_processes // self.ranks_per_task

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules that a warm process imports besides torch: the launch path's, then the user's."""
        return (*self.launch.preload, *self.startup.preload)

    @property
    def label(self) -> str:
        """The run's name, if it has one, and its identifier, to show to users."""
        return self.run_id if self.name is None else f"{self.name} ({self.run_id})"

    @property
    def title(self) -> str:
        """The name or path of the target, to show to users."""
        return self.target.path if isinstance(self.target, Script) else self.target.name


class StatusDetail(NamedTuple):
    """One step of a run's start, such as waiting for free slots."""

    what: str  # the same during the step
    how_far: str = ""  # its progress
    yields: bool = False  # the run needs none of the slots that the cluster has, as yet
    holds: bool = False  # the run has its slots

    def __str__(self) -> str:
        return self.what + self.how_far


class Status(enum.Enum):
    """The state of a run."""

    WAITING = "waiting"
    """The run waits for slots and for its nodes to come up."""
    STARTING = "starting"
    """The first node is up, and the ranks are starting."""
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
