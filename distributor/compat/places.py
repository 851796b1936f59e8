"""Finds out how many task slots and GPUs a run can use, on the executors or on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributor.api.scheduling import active_session, choose_session, driver_gpus
from distributor.machine import devices, processes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Place:
    """The place where a run would train if it began now."""

    exists: bool = True  # ``False`` if a run needs a Spark session and none is active
    executors: bool = False  # on executors of a cluster, and not on this machine
    gpus: int | None = 0  # of all executors that are up, or of this machine; ``None`` if not known
    cpus: int | None = 1  # task slots that the CPUs allow; ``None`` if not known


def look(local_mode: bool | None, environ: Mapping[str, str]) -> Place:
    """Return where a run with this ``local_mode`` would train, given the active session and this machine."""
    session, here = choose_session(local_mode, needed=False)
    if session is None:
        master = active_session() if local_mode is None else None  # a master local[n] limits the slots to n
        gpus = _gpus_here(environ)
        return Place(exists=here, gpus=gpus, cpus=processes.cpu_count() if master is None else _cores(master))
    from distributor.schedulers.spark.sessions import is_connect
    from distributor.schedulers.spark.slots import cluster_of, executors

    cluster = cluster_of(session)
    if cluster.is_local and not is_connect(session):
        return Place(gpus=_gpus_here(environ), cpus=_cores(session))
    cores = [] if is_connect(session) else [each.cores for each in executors(session) if each.cores]
    if not cores:  # Spark Connect does not list executors, or no executor is up yet
        return Place(executors=True, gpus=None if cluster.executor_gpus else 0, cpus=None)
    return Place(
        executors=True,
        gpus=len(cores) * cluster.executor_gpus,
        cpus=sum(each // cluster.task_cpus for each in cores),
    )


def _gpus_here(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that Spark found for the driver or, if Spark found none, that this machine has."""
    found = driver_gpus()
    return len(devices.local_gpus(environ) if found is None else found)


def _cores(session: SparkSession) -> int | None:
    """Return the number of task slots of a session on a ``local[...]`` master; ``None`` if it is not known."""
    from distributor.schedulers.spark.slots import cluster_of

    cluster = cluster_of(session)
    return None if cluster.executor_cores is None else cluster.executor_cores // cluster.task_cpus
