"""Refuse what Spark cannot do inside a rank, and say what to do instead.

A rank gets no classic Spark session, because each rank would start its own JVM and do the same work. A rank may create
a Spark Connect session, because such a session starts no JVM.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any, NoReturn

from distributor.rank.imports import on_import

#: The environment variable that allows classic Spark sessions in ranks.
_ALLOW = "DISTRIBUTOR_ALLOW_SPARK"

#: The module in which pyspark starts JVMs, and all modules that have imported its function ``launch_gateway``.
_GATEWAY = "pyspark.java_gateway"
_USERS = (_GATEWAY, "pyspark.core.context", "pyspark.context")

_TEXT = (
    "a SparkSession cannot be created inside a rank: each rank would start a JVM of its own. Prepare data with Spark "
    "on the driver, before the run, and write it to files, such as Parquet, that the ranks read. If each rank is to "
    f'have its own JVM, pass env={{"{_ALLOW}": "1"}}'
)

#: The module of ``SparkFiles`` in PySpark 4, and in PySpark 3.5.
_FILES = ("pyspark.core.files", "pyspark.files")

_NO_FILES = (
    "SparkFiles works in Spark's own tasks only: pass the file's folder as working_dir=. Ranks then find the file in "
    "their current directory"
)


def refuse() -> None:
    """Make pyspark raise an error where it would start a JVM in this process, or look for Spark's files.

    A JVM may start if the user has set ``DISTRIBUTOR_ALLOW_SPARK`` to ``1``.
    """
    if os.environ.get(_ALLOW) != "1":
        on_import(_GATEWAY, _replace)
    for name in _FILES:
        on_import(name, _replace_files)


def _replace(_gateway: ModuleType) -> None:
    """Make pyspark's function ``launch_gateway``, which starts a JVM, raise an error.

    ``launch_gateway`` is replaced in its own module and in the other modules of pyspark that have imported it. These
    modules may be loaded already, because a rank may be a fork of a process that has imported pyspark.
    """
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
