"""Computes what resources a run's tasks request from Spark, and how many of these tasks the executors can run.

With a resource profile (stage-level scheduling), the tasks of one stage can have other numbers of CPUs and GPUs than
the session's settings say. A barrier stage can only use executors that exist: Spark starts some for a profile only with
dynamic allocation, which barrier mode does not allow. Source:
https://spark.apache.org/docs/latest/configuration.html#stage-level-scheduling-overview
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from distributor.errors import ConfigurationError, ResourceError
from distributor.schedulers.spark.sessions import conf, elements, has_executors, is_connect, master_of
from distributor.schedulers.spark.spark_versions import why_no_frame_profiles, why_no_profiles
from distributor.text.wording import mebibytes, parse_memory
from distributor.values.job import Job, TaskProfile
from distributor.values.options import Resources
from distributor.values.placement import host_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


GPU = "gpu"
_TASK_GPUS = "spark.task.resource.gpu.amount"
_EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"

#: Spark's defaults for an executor's memory outside its JVM heap: this share of the heap, but at least this size.
_OVERHEAD_SHARE = 0.1
_OVERHEAD_LEAST = "384m"

_TASKS_OF_A_GPU = 4  # that feed a model there, if the settings do not say how many cores executors have

#: Resource profiles by session, reused because Spark keeps each profile for as long as the application lives.
_profiles: WeakKeyDictionary[SparkSession, dict[TaskProfile, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Cluster:
    """The settings of a session that describe its tasks and executors."""

    master: str
    task_cpus: int = 1
    task_gpus: str = "0"  # as the setting is written
    executor_cores: int | None = None  # None if the settings do not say
    executor_gpus: int = 0
    memory_beside_heap: int | None = 384 << 20  # bytes for Python and other uses; None if the settings cannot be parsed
    no_profiles: str | None = None  # why stages cannot have their own numbers of CPUs and GPUs

    @property
    def is_local(self) -> bool:
        """Whether tasks run in the driver's JVM."""
        return not has_executors(self.master)


def cluster_of(session: SparkSession) -> Cluster:
    """Read the settings of a session that describe its tasks and executors."""
    try:
        memory = _memory_beside_heap(session)
    except ValueError:
        memory = None
    master = master_of(session)
    local = re.fullmatch(r"local(?:\[(\d+|\*).*\])?", master)
    of_master = re.fullmatch(r"local-cluster\[\s*\d+\s*,\s*(\d+)\s*,.*", master)
    cores: Any = conf(session, "spark.executor.cores")
    if of_master is not None:
        cores = of_master[1]
    elif local is not None:
        cores = local[1] or 1
    if cores is None and master.startswith(("yarn", "k8s://")):
        cores = 1
    elif cores == "*":
        cores = None if is_connect(session) else session.sparkContext.defaultParallelism
    return Cluster(
        master=master,
        task_cpus=int(conf(session, "spark.task.cpus", "1")),
        task_gpus=str(conf(session, _TASK_GPUS, "0")),
        executor_cores=None if cores is None else int(cores),
        executor_gpus=int(float(conf(session, _EXECUTOR_GPUS) or 0)),
        memory_beside_heap=memory,
        no_profiles=why_no_profiles(session.version, master, connect=is_connect(session)),
    )


class Executor(NamedTuple):
    """A live executor that accepts tasks: Spark is not decommissioning it."""

    address: str  # host and port of its blocks; tasks see another port and, on YARN, the host's number for its name
    cores: int
    running: int  # tasks
    id: str = ""


def executors(session: SparkSession) -> Iterator[Executor]:
    """Yield each executor of a classic session that accepts tasks."""
    scala = session.sparkContext._jsc.sc()
    scheduler = scala.taskScheduler()
    running = scheduler.runningTasksByExecutors()
    for executor in elements(scala.statusStore().executorList(True)):
        if executor.isExcluded() or scheduler.getExecutorDecommissionState(executor.id()).isDefined():
            continue
        tasks = running.get(executor.id())
        busy = int(tasks.get()) if tasks.isDefined() else 0
        # Spark lists the driver too. On a cluster, it has 0 cores, so no task fits there.
        yield Executor(str(executor.hostPort()), int(executor.totalCores()), busy, str(executor.id()))


def profiled(session: SparkSession) -> dict[str, list[TaskProfile]]:
    """Return what running tasks hold that have other CPUs or GPUs than the settings say, by executor."""
    scala = session.sparkContext._jsc.sc()
    found: dict[str, list[TaskProfile]] = {}
    store, manager = scala.statusStore(), scala.resourceProfileManager()
    for stage in elements(store.activeStages()):
        if not (number := stage.resourceProfileId()):
            continue
        asked = manager.resourceProfileFromId(number).taskResources()
        cpus, gpus = (asked.get(name) for name in ("cpus", GPU))
        held = TaskProfile(
            int(cpus.get().amount()) if cpus.isDefined() else scala.conf().getInt("spark.task.cpus", 1),
            float(gpus.get().amount()) if gpus.isDefined() else 0,
        )
        for task in elements(store.taskList(stage.stageId(), stage.attemptId(), stage.numTasks())):
            if task.status() == "RUNNING":
                found.setdefault(str(task.executorId()), []).append(held)
    return found


def shape(resources: Resources, cluster: Cluster) -> tuple[int, TaskProfile | None]:
    """Return ranks per task, and the CPUs and GPUs to request for a task; ``None``: the session's settings suffice.

    ConfigurationError: the settings do not suit the request, and a profile is impossible. ResourceError: more is
    requested than an executor or a task can have.
    """
    ranks, gpus = _gpus(resources, cluster)
    limit = node_limit(resources, cluster)
    if limit is not None and limit < ranks:
        raise ResourceError(
            f"max_processes_per_node or memory_per_process allows {limit} rank{'s' * (limit > 1)} per executor, but "
            f"each task hosts {ranks} ({_TASK_GPUS}={cluster.task_gpus}): raise "
            "max_processes_per_node, lower memory_per_process, or give tasks fewer GPUs"
        )
    cpus = cluster.task_cpus if resources.cpus_per_process is None else ranks * resources.cpus_per_process
    if cluster.executor_cores is not None and cpus > cluster.executor_cores:
        raise ResourceError(
            f"a task of {ranks} rank{'s' * (ranks > 1)} needs {cpus} cores "
            f"(cpus_per_process={resources.cpus_per_process}), but each executor has {cluster.executor_cores}: lower "
            "cpus_per_process, or raise spark.executor.cores"
        )
    default_gpus = float(cluster.task_gpus) if resources.use_gpu else gpus
    if cpus == cluster.task_cpus and gpus == default_gpus:
        return ranks, None
    if cluster.no_profiles is not None:
        raise ConfigurationError(
            f"this session cannot run tasks of {cpus} CPU{'s' * (cpus > 1)}{f' and {gpus} GPUs' if gpus else ''} "
            f"(spark.task.cpus={cluster.task_cpus}, {_TASK_GPUS}={cluster.task_gpus}), and {cluster.no_profiles}: "
            f"start a session with spark.task.cpus and {_TASK_GPUS} set to what such a task needs, and leave out "
            "gpus_per_process and cpus_per_process"
        )
    return ranks, TaskProfile(cpus, gpus)


def _gpus(resources: Resources, cluster: Cluster) -> tuple[int, int]:
    """Return how many ranks one task hosts, and how many GPUs it gets."""
    if not resources.use_gpu:
        return 1, 0
    text = cluster.task_gpus
    try:
        amount = float(text)
    except ValueError:
        raise ConfigurationError(f"{_TASK_GPUS} is {text!r}: it must be a whole number of GPUs per task") from None
    per_rank = resources.gpus_per_process
    count = resources.num_processes
    if per_rank is not None:
        if amount > 0 and amount == int(amount) and amount % per_rank == 0 and count % (amount // per_rank) == 0:
            return int(amount) // per_rank, int(amount)
        if cluster.executor_gpus < per_rank:
            raise ResourceError(
                f"gpus_per_process={per_rank}, but {_EXECUTOR_GPUS} gives each executor {cluster.executor_gpus}: raise "
                "that setting when the session starts (with a discovery script), or lower gpus_per_process"
            )
        return 1, per_rank
    if amount == 0 and cluster.executor_gpus > 0 and cluster.no_profiles is None:
        return 1, 1
    if amount == 0:
        raise ResourceError(
            f"use_gpu=True, but '{_TASK_GPUS}' was unset, so Spark gives tasks no GPU: set it (usually to 1) with "
            f"{_EXECUTOR_GPUS} and a discovery script, or pass use_gpu=False to train on CPUs"
        )
    if amount != int(amount) or amount < 0:
        raise ConfigurationError(
            f"{_TASK_GPUS} is {text}: ranks cannot share a GPU (NCCL refuses two ranks on one device). Set it to 1, or "
            "pass gpus_per_process=1 to request whole GPUs for this run alone, through stage-level scheduling"
        )
    if count % int(amount):
        raise ConfigurationError(
            f"num_processes={count} must be a multiple of {_TASK_GPUS}={int(amount)}: "
            "each task hosts as many ranks as it has GPUs"
        )
    return int(amount), int(amount)


def model_profile(num_gpus: int, cluster: Cluster, spark: str) -> TaskProfile | None:
    """Return what a task requests that feeds a model on GPUs; ``None``: the session's settings suffice.

    All tasks that an executor has cores for share its GPUs. ConfigurationError: tasks cannot have such GPUs.
    """
    gpus = _float(cluster.task_gpus)
    if not num_gpus or cluster.is_local or gpus == num_gpus or (num_gpus == 1 and 0 < gpus < 1):
        return None
    has = cluster.executor_gpus
    too_few = f"{_EXECUTOR_GPUS} gives each executor {has}" if has < num_gpus else None
    if reason := why_no_frame_profiles(spark) or too_few or cluster.no_profiles:
        raise ConfigurationError(
            f"predict(num_gpus={num_gpus}): the settings give each task {cluster.task_gpus} GPUs, and {reason}: start "
            f"a session with {_EXECUTOR_GPUS} (at least {num_gpus}), a discovery script, and "
            f"{_TASK_GPUS}={0.25 if num_gpus == 1 else num_gpus}"
        )
    models = cluster.executor_gpus // num_gpus
    tasks = _TASKS_OF_A_GPU
    if cluster.executor_cores is not None:
        tasks = max(1, cluster.executor_cores // cluster.task_cpus // models)
    return TaskProfile(cluster.task_cpus, 1 / tasks if num_gpus == 1 else num_gpus)


def node_limit(resources: Resources, cluster: Cluster) -> int | None:
    """Return how many ranks one executor may host, ``None`` for any number. ResourceError: not even one."""
    limits = [] if resources.max_processes_per_node is None else [resources.max_processes_per_node]
    if resources.memory_per_process is not None:
        if cluster.memory_beside_heap is None:
            raise ConfigurationError(
                "memory_per_process depends on the memory that executors have beside their JVM heap, but one of the "
                "settings spark.executor.memory, .memoryOverhead, .minMemoryOverhead and .pyspark.memory is not a size "
                "such as '8g'"
            )
        fit = cluster.memory_beside_heap // resources.memory_per_process
        if fit == 0:
            raise ResourceError(
                f"memory_per_process={mebibytes(resources.memory_per_process)}, but each executor has "
                f"{mebibytes(cluster.memory_beside_heap)} beside its JVM heap (spark.executor.memoryOverhead and "
                "spark.executor.pyspark.memory): raise spark.executor.memoryOverhead when the session starts. A run "
                "cannot ask for larger executors: Spark adds those by dynamic allocation, which barrier mode rules out"
            )
        limits.append(fit)
    return min(limits, default=None)


def _float(text: str) -> float:
    """Parse a number; return 0 if the text is not one."""
    try:
        return float(text)
    except ValueError:
        return 0.0


@cache
def _names_of(host: str) -> set[str]:
    """Return the name and the addresses of a host, as far as they are known here."""
    with suppress(OSError):
        found = {str(each[4][0]) for each in socket.getaddrinfo(host.strip("[]"), None)}
        return {host, *(f"[{each}]" if ":" in each else each for each in found)}
    return {host}


class Slots:
    """Counts the slots that a session has for the tasks of one job.

    All methods but ``check``, ``most`` and ``too_few`` need a classic session.
    """

    def __init__(self, session: SparkSession, cluster: Cluster, job: Job) -> None:
        self._session = session
        self._cluster = cluster
        self._job = job
        # Without a profile, each task occupies the GPUs that the session's settings say, even if it uses none.
        requested = job.task_profile
        self._cpus = cluster.task_cpus if requested is None else requested.cpus
        self._gpus = _float(cluster.task_gpus) if requested is None else float(requested.gpus)

    def check(self) -> None:
        """Raise ResourceError if the job needs more slots than the cluster can ever have by its settings."""
        most = self.most()
        if most is not None and self._job.num_tasks > most:
            raise ResourceError(self.too_few(most))

    def most(self) -> int | None:
        """Return the largest number of task slots that the cluster can have; ``None`` if unknown."""
        cores = self._cluster.executor_cores
        if cores is None:
            return None
        instances = 1 if self._cluster.is_local else self._instances(cores)
        return instances * self._usable(cores, 0) if instances > 0 else None

    def _instances(self, cores: int) -> int:
        """Return how many executors with these cores there are at most by the settings; 0 if they do not say."""
        if (of_master := re.match(r"local-cluster\[\s*(\d+)", self._cluster.master)) is not None:
            return int(of_master[1])
        if self._cluster.master.startswith("spark://"):  # a standalone cluster ignores spark.executor.instances
            return int(conf(self._session, "spark.cores.max") or 0) // cores
        return int(conf(self._session, "spark.executor.instances") or 0)

    def total(self) -> int:
        """Return the number of slots, free or busy, of live executors, up to the limit of ranks per node."""
        if self.limited:
            return sum(self._usable(executor.cores, 0) for executor in executors(self._session))
        scala = self._session.sparkContext._jsc.sc()
        manager = scala.resourceProfileManager()
        jvm_profile = manager.defaultResourceProfile()
        if self._job.task_profile is not None:
            jvm_profile = profile(self._session, self._job.task_profile)._java_resource_profile
            manager.addResourceProfile(jvm_profile)
        return int(scala.maxNumConcurrentTasks(jvm_profile))

    def free(self) -> int:
        """Return the number of free task slots."""
        held = profiled(self._session)
        there = executors(self._session)
        free = sum(self._usable(each.cores, each.running, held.get(each.id, ())) for each in there)
        return free if self.limited else min(self.total(), free)  # with a limit, free cannot exceed total()

    def room_beside(self, hosts: Collection[str], tasks: Mapping[str, int]) -> int:
        """Return the number of free slots beside ``hosts``, those of the job's own ``tasks`` by host included."""
        room, own, held = 0, dict(tasks), profiled(self._session)
        for executor in executors(self._session):
            names = _names_of(host_in(executor.address))
            if names.isdisjoint(hosts):
                mine = {name: min(own[name], executor.running) for name in names & own.keys()}
                own.update({name: own[name] - count for name, count in mine.items()})
                count = sum(mine.values())
                others = held.get(executor.id, [])[0 if self._job.task_profile is None else count :]
                room += self._usable(executor.cores, executor.running - count, others)
        return room

    def busy(self) -> bool:
        """Return whether any task runs on an executor."""
        return any(executor.running for executor in executors(self._session))

    def ready(self) -> bool:
        """Return whether there are enough slots to submit the run to Spark now.

        Spark itself waits for busy slots, but spreads the tasks of a barrier stage evenly only if all are free. So if
        ranks per node are limited, only free slots count.
        """
        return (self.free() if self.limited else self.total()) >= self._job.num_tasks

    @property
    def limited(self) -> bool:
        return self._job.node_limit is not None

    def _usable(self, cores: int, running: int, held: Sequence[TaskProfile] = ()) -> int:
        """Return how many tasks of the job fit on an executor with ``running`` tasks, some with a profile: ``held``."""
        held = held[: max(0, running)]  # Spark may record ends late
        plain = running - len(held)
        taken = plain * self._cluster.task_cpus + sum(task.cpus for task in held)
        fit = max(0, cores - taken) // self._cpus
        if self._gpus > 0:
            busy = plain * _float(self._cluster.task_gpus) + sum(task.gpus for task in held)
            gpus = self._cluster.executor_gpus - busy
            fit = min(fit, max(0, int(gpus / self._gpus)))
        limit = self._job.node_limit
        return fit if limit is None else min(fit, limit // self._job.ranks_per_task)

    def too_few(self, slots: int) -> str:
        """Return why this number of slots is too few for the job, and what to do."""
        job = self._job
        gpu = f" with {self._gpus:g} GPU{'s' * (self._gpus > 1)} each ({_TASK_GPUS})" if self._gpus else ""
        cpus = f" of {self._cpus} CPUs" if self._cpus > 1 else ""
        most = job.node_limit
        limit = "" if most is None else f", at most {most} rank{'s' * (most > 1)} per executor"
        smaller = "spark.task.cpus" if job.task_profile is None else "cpus_per_process"
        larger = (
            f"spark.executor.cores, or lower {smaller}"
            if most is None
            else "max_processes_per_node, or ask for less memory_per_process"
        )
        return (
            f"num_processes={job.resources.num_processes} needs {job.num_tasks} task slots{cpus}{gpu} at once{limit}, "
            f"but the cluster ({self._cluster.master}) has {slots}: lower num_processes, or raise "
            f"spark.executor.instances or {larger}"
        )


def profile(session: SparkSession, task: TaskProfile) -> Any:
    """Return Spark's resource profile for the CPUs and GPUs of a task, made once in a session."""
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    made = _profiles.setdefault(session, {})
    if task not in made:
        requests = TaskResourceRequests().cpus(task.cpus)
        if task.gpus:
            requests = requests.resource(GPU, task.gpus)
        made.setdefault(task, ResourceProfileBuilder().require(requests).build)
    if is_connect(session):
        _register(session, made[task])
    return made[task]


def _register(session: Any, built: Any) -> None:
    """Let the server of a Connect session know a profile.

    PySpark would do so at its first use, perhaps in another thread, and in the session that is active there.
    """
    active = type(session)._active_session
    before = getattr(active, "session", None)
    active.session = session
    try:
        _ = built.id
    finally:
        active.session = before


def _memory_beside_heap(session: SparkSession) -> int:
    """Return the bytes that each executor has outside its heap, by the rules of YARN and Kubernetes."""
    heap = parse_memory(conf(session, "spark.executor.memory") or "1g", "m")
    overhead = conf(session, "spark.executor.memoryOverhead")
    if overhead:
        beside = parse_memory(overhead, "m")
    else:
        factors = ("spark.executor.memoryOverheadFactor", "spark.kubernetes.memoryOverheadFactor")
        share = float(next(filter(None, (conf(session, key) for key in factors)), _OVERHEAD_SHARE))
        least = parse_memory(conf(session, "spark.executor.minMemoryOverhead") or _OVERHEAD_LEAST, "m")
        beside = max(least, int(heap * share))
    return beside + parse_memory(conf(session, "spark.executor.pyspark.memory") or "0", "m")
