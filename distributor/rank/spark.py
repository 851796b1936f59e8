"""Refuse a classic Spark session inside a rank, because each rank would start its own JVM and do the same work.

A rank may create a Spark Connect session, because such a session starts no JVM.
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


def refuse() -> None:
    """Make pyspark raise an error where it would start a JVM in this process.

    Do nothing if the user has set ``DISTRIBUTOR_ALLOW_SPARK`` to ``1``.
    """
    if os.environ.get(_ALLOW) != "1":
        on_import(_GATEWAY, _replace)


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
