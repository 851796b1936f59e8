"""Which scheduler a run gets."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distributor.schedulers.local import LocalScheduler
    from distributor.schedulers.spark.scheduler import SparkScheduler


def choose_scheduler(session: SparkSession | None, use_gpu: bool) -> SparkScheduler | LocalScheduler:
    """That of a session; without one this machine, with the GPUs that Spark found for the driver where it did."""
    if session is not None:
        from distributor.schedulers.spark.scheduler import SparkScheduler

        return SparkScheduler(session)
    from distributor.schedulers.local import LocalScheduler

    gpus = None
    if use_gpu and sys.modules.get("pyspark") is not None:
        from distributor.schedulers.spark import session as spark_session

        gpus = spark_session.driver_gpus()
    return LocalScheduler(gpus=gpus)
