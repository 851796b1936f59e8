"""Finds out how many GPUs a run can use, on the executors or on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributor.api.scheduling import choose_session, driver_gpus
from distributor.machine import devices


@dataclass(frozen=True)
class Place:
    """The place where a run would train if it began now.

    Attributes:
        exists: whether a run can train there; ``False`` if it needs a Spark session and none is active.
        executors: whether the run would train on the executors of a cluster, and not on this machine.
        gpus: number of GPUs of all executors that are up, or of this machine; ``None`` if the number is not known.
    """

    exists: bool = True
    executors: bool = False
    gpus: int | None = 0


def look(local_mode: bool | None, environ: Mapping[str, str]) -> Place:
    """Return where a run with this ``local_mode`` would train. ``environ`` says which GPUs of this machine can be used.

    Raises:
        ConfigurationError: pyspark is needed and cannot be imported, or the active session has ended.
    """
    session, here = choose_session(local_mode, needed=False)
    if session is not None:
        from distributor.schedulers.spark.sessions import is_connect
        from distributor.schedulers.spark.slots import cluster_of, executors

        cluster = cluster_of(session)
        if is_connect(session) or not cluster.is_local:
            if not cluster.executor_gpus:
                return Place(executors=True)
            up = 0 if is_connect(session) else sum(each.cores > 0 for each in executors(session))
            # Spark Connect does not list executors, and maybe none is up yet.
            return Place(executors=True, gpus=up * cluster.executor_gpus or None)
    gpus = driver_gpus()
    return Place(exists=here or session is not None, gpus=len(devices.local_gpus(environ) if gpus is None else gpus))
