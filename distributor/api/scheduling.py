"""Chooses where a run trains: the Spark session, and the scheduler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from distributor.errors import ConfigurationError
from distributor.values.options import Resources

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distributor.schedulers.base import Scheduler


def choose_session(
    local_mode: bool | None, use_gpu: bool = False, *, needed: bool = True
) -> tuple[SparkSession | None, bool]:
    """Return the Spark session to train on, or ``None``, and whether to train on this machine without Spark.

    Tasks of a session with the master ``local[...]`` get no GPUs: ranks that use GPUs then train without Spark.
    ``(None, False)`` is a missing session that is not ``needed``.
    """
    if local_mode is True:
        return None, True
    if local_mode is None and "pyspark" not in sys.modules:
        return None, True  # without pyspark there is no active session
    try:
        from distributor.schedulers.spark import sessions as spark_session

        session = spark_session.active_session()
    except ImportError as error:
        if local_mode is None:
            return None, True
        raise ConfigurationError(
            f"local_mode=False trains on Spark, but pyspark cannot be imported ({error}): "
            "pip install 'distributor[spark]'"
        ) from error
    if local_mode is None:
        session = session if session is not None and spark_session.is_cluster(session) else None
    if session is not None:
        spark_session.check_alive(session)
    if session is None and needed and local_mode is False:
        raise ConfigurationError(
            "local_mode=False trains on Spark, but there is no active Spark session: create one first "
            "(SparkSession.builder.getOrCreate()), or pass local_mode=True to train on this machine"
        )
    if local_mode is None:
        return session, session is None
    if session is not None and use_gpu and not spark_session.is_cluster(session):
        return None, True
    return session, False


def is_here(session: SparkSession | None) -> bool:
    """Whether all ranks run on the driver's machine, as far as the session's master says."""
    if session is None:
        return True
    from distributor.schedulers.spark import sessions as spark_session

    master = spark_session.master_of(session)
    return not spark_session.is_connect(session) and spark_session.is_on_this_machine(master)


def choose_scheduler(session: SparkSession | None, use_gpu: bool) -> Scheduler:
    """Return the session's scheduler, or the local one, with the GPUs that Spark found for the driver, if any."""
    if session is not None:
        from distributor.schedulers.spark.scheduler import SparkScheduler

        return SparkScheduler(session)
    from distributor.schedulers.local import LocalScheduler

    return LocalScheduler(gpus=driver_gpus() if use_gpu else None)


def driver_gpus() -> tuple[str, ...] | None:
    """Return the GPUs that Spark found for the driver, if any. Does not import pyspark."""
    if sys.modules.get("pyspark") is None:
        return None
    from distributor.schedulers.spark import sessions as spark_session

    return spark_session.driver_gpus()


def check_gpus(local_mode: bool | None, resources: Resources) -> None:
    """Check that there are GPUs, CPUs and memory for ranks on GPUs, if it is known where they will train.

    On Spark, only the session's settings are checked, and not how many executors there are.
    """
    if not resources.use_gpu or local_mode is None:
        return
    if local_mode:
        choose_scheduler(None, use_gpu=True).shape(resources)
        return
    if sys.modules.get("pyspark") is None:
        return
    session, here = choose_session(False, use_gpu=True, needed=False)
    if session is not None or here:
        choose_scheduler(session, use_gpu=True).shape(resources)


def active_session() -> SparkSession | None:
    """Return the active Spark session, if any. Does not import pyspark."""
    if sys.modules.get("pyspark") is None:
        return None
    from distributor.schedulers.spark import sessions as spark_session

    return spark_session.active_session()
