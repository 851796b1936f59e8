"""The choice of a run's scheduler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distributor.schedulers.base import Scheduler


def choose_scheduler(session: SparkSession | None, use_gpu: bool) -> Scheduler:
    """Return the Spark scheduler for a session, or the local scheduler if ``session`` is ``None``.

    The local scheduler uses the GPUs that Spark found for the driver, if Spark found any.
    """
    if session is not None:
        from distributor.schedulers.spark.scheduler import SparkScheduler

        return SparkScheduler(session)
    from distributor.schedulers.local import LocalScheduler

    gpus = None
    if use_gpu and sys.modules.get("pyspark") is not None:
        from distributor.schedulers.spark import session as spark_session

        gpus = spark_session.driver_gpus()
    return LocalScheduler(gpus=gpus)
