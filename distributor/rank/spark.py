"""Refuse what Spark cannot do inside a rank, and say what to do instead.

A classic Spark session would start a JVM in each rank. A Spark Connect session starts none, so a rank may create one.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any, NoReturn

from distributor.machine.imports import on_import

_ALLOW = "DISTRIBUTOR_ALLOW_SPARK"  # "1" allows classic sessions in ranks

# Where pyspark starts JVMs, and all modules that have imported its function ``launch_gateway``.
_GATEWAY = "pyspark.java_gateway"
_USERS = (_GATEWAY, "pyspark.core.context", "pyspark.context")

_TEXT = (
    "a SparkSession cannot be created inside a rank: each rank would start a JVM of its own. Prepare data with Spark "
    "on the driver, before the run, and write it to files, such as Parquet, that the ranks read. If each rank is to "
    f'have its own JVM, pass env={{"{_ALLOW}": "1"}}'
)

_FILES = ("pyspark.core.files", "pyspark.files")  # PySpark 4, PySpark 3.5

_NO_FILES = (
    "SparkFiles works in Spark's own tasks only: pass the file's folder as working_dir=. Ranks then find the file in "
    "their current directory"
)


def refuse() -> None:
    """Make pyspark raise an error where it would start a JVM, unless allowed, or look for Spark's files."""
    if os.environ.get(_ALLOW) != "1":
        on_import(_GATEWAY, _replace)
    for name in _FILES:
        on_import(name, _replace_files)


def _replace(_gateway: ModuleType) -> None:
    """Replace ``launch_gateway`` wherever pyspark has imported it, which may be before the fork of this rank."""
    for name in _USERS:
        if hasattr(sys.modules.get(name), "launch_gateway"):
            sys.modules[name].launch_gateway = _launch_gateway  # type: ignore[attr-defined]


def _launch_gateway(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(_TEXT)


def _replace_files(module: ModuleType) -> None:
    """Make ``SparkFiles`` raise an error that says what to do, unless this process has a Spark context of its own."""
    files: Any = module.SparkFiles
    inherited = files.getRootDirectory

    def root_directory(_: type) -> Any:
        if files._is_running_on_worker or files._sc is not None:
            return inherited()
        raise RuntimeError(_NO_FILES)

    files.getRootDirectory = classmethod(root_directory)
