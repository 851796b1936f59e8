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
    """Return the Spark session to train on (or ``None``), and whether to train on this machine without Spark.

    The result is ``(None, False)`` if the user asks for Spark, but there is no session and ``needed`` is false. If the
    session's master is ``local[...]``, Spark's tasks run on this machine but get no GPUs. Ranks that use GPUs then run
    on this machine without Spark.

    Args:
        local_mode: whether the user wants to train on this machine (``True``) or on Spark (``False``). ``None`` chooses
            Spark if the active session is on a cluster.
        use_gpu: whether ranks use GPUs.
        needed: whether a missing session is an error if the user asks for Spark.

    Raises:
        ConfigurationError: training on Spark is requested, but there is no pyspark or no session; or the session has
            ended.
    """
    if local_mode is True:
        return None, True
    if local_mode is None and "pyspark" not in sys.modules:
        return None, True  # without pyspark there is no active session
    try:
        from distributor.schedulers.spark import session as spark_session

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


def choose_scheduler(session: SparkSession | None, use_gpu: bool) -> Scheduler:
    """Return the Spark scheduler for a session, or the local scheduler if ``session`` is ``None``.

    The local scheduler uses the GPUs that Spark found for the driver, if Spark found any.
    """
    if session is not None:
        from distributor.schedulers.spark.scheduler import SparkScheduler

        return SparkScheduler(session)
    from distributor.schedulers.local import LocalScheduler

    return LocalScheduler(gpus=driver_gpus() if use_gpu else None)


def driver_gpus() -> tuple[str, ...] | None:
    """Return the GPUs that Spark found for the driver; ``None`` if it found none. Does not import pyspark."""
    if sys.modules.get("pyspark") is None:
        return None
    from distributor.schedulers.spark import session as spark_session

    return spark_session.driver_gpus()


def check_gpus(local_mode: bool | None, resources: Resources) -> None:
    """Check that there are GPUs for the ranks, if it is already known where ranks will train.

    If ranks use GPUs, CPUs and memory are checked too. On Spark, only the session's settings are checked, and not how
    many executors there are.

    Raises:
        ResourceError: this machine has less than requested, or the session's settings provide too little for a task.
        ConfigurationError: the session has ended, or its settings do not suit the request.
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
    """Return the active Spark session; ``None`` if there is none. Does not import pyspark."""
    if sys.modules.get("pyspark") is None:
        return None
    from distributor.schedulers.spark import session as spark_session

    return spark_session.active_session()
