"""Spark sessions that tests share: starting a JVM costs seconds, so it is done once per kind of settings."""

from __future__ import annotations

import os
import re
import stat
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import watch

from distributor import TorchDistributor

MASTERS = ("local[4]", "local-cluster[2,2,1024]")
LOCAL = "local"

# Settings of all sessions that tests and what they start make.
os.environ["SPARK_CONF_DIR"] = str(Path(__file__).parent / "spark")

Make = Callable[..., TorchDistributor]


def path_without_torch(folder: Path) -> str:
    """A PATH whose ``python3`` is one of the same version in which nothing is installed."""
    venv.create(folder, symlinks=True)
    return os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])


class Sessions:
    """At most one Spark session at a time, started when a test asks for other settings than the last one's."""

    def __init__(self) -> None:
        self._key: tuple[tuple[str, str], ...] | None = None
        self._session: Any = None

    def get(self, master: str, **settings: str) -> Any:
        key = (("master", master), *sorted(settings.items()))
        if key == self._key and self._session.sparkContext._jsc is not None:
            if not settings:
                self._await_executors(master)
            return self._session
        self.stop()
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        # The settings of the session that starts the JVM are its system properties, which all later sessions get too.
        SparkContext._ensure_initialized()
        builder = (
            SparkSession.builder.master(master)
            .appName("distributor tests")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
        )
        for name, value in settings.items():
            builder = builder.config(name, value)
        self._session = builder.getOrCreate()
        self._session.sparkContext.setLogLevel("OFF")
        self._key = key
        if not settings:  # others may be about executors that do not come
            self._await_executors(master)
        return self._session

    def _await_executors(self, master: str) -> None:
        """Until all are there: at first, and after a test has killed one. Spark starts tasks on those that it has."""
        cluster = re.match(r"local-cluster\[(\d+),", master)
        if cluster is not None:
            scala = self._session.sparkContext._jsc.sc()
            watch.until(lambda: scala.getExecutorMemoryStatus().size() > int(cluster[1]))  # the driver is one of them

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()
        self._session = self._key = None


def two_gpus(script: Path, text: str) -> dict[str, str]:
    """Settings of a cluster whose workers have the two GPUs that a discovery script reports."""
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "2",
        "spark.executor.resource.gpu.discoveryScript": str(script),
    }
