"""Finds out how many GPUs a run can use, on the executors or on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributor.api.scheduling import choose_session, driver_gpus
from distributor.machine import devices


@dataclass(frozen=True)
class Place:
    """The place where a run would train if it began now."""

    exists: bool = True  # False: no Spark session is active, and one is needed
    executors: bool = False  # not this machine
    gpus: int | None = 0  # of all executors that are up, or of this machine; None: not known


def look(local_mode: bool | None, environ: Mapping[str, str]) -> Place:
    """Return where a run would train. ``environ`` says which of this machine's GPUs can be used."""
    session, here = choose_session(local_mode, needed=False)
    if session is not None:
        from distributor.schedulers.spark.sessions import is_connect
        from distributor.schedulers.spark.slots import cluster_of, executors

        cluster = cluster_of(session)
        if is_connect(session) or not cluster.is_local:
            if not cluster.executor_gpus:
                return Place(executors=True)
            up = 0 if is_connect(session) else sum(executor.cores > 0 for executor in executors(session))
            # Spark Connect does not list executors, and maybe none is up yet.
            return Place(executors=True, gpus=up * cluster.executor_gpus or None)
    gpus = driver_gpus()
    return Place(exists=here or session is not None, gpus=len(devices.local_gpus(environ) if gpus is None else gpus))
