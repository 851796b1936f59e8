"""Run a command as if nothing of Spark, torchrun or a proxy were set: ``unset.py python program.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase

#: Patterns for variables with which other programs, or other versions of Spark, are set up on many machines.
FOREIGN = (
    *("SPARK_*", "PYSPARK_*", "HADOOP_*", "YARN_*", "PYTHONPATH"),
    *("*RANK", "*WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "ACCELERATE_*"),
    *("OMP_*", "DISTRIBUTOR_*", "*_proxy", "*_PROXY"),
)


def foreign(names: Iterable[str]) -> set[str]:
    """Return which of the names are variables that this project's commands and tests must not see."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in FOREIGN)}


if __name__ == "__main__":
    gone = foreign(os.environ)
    os.execve(sys.argv[1], sys.argv[1:], {name: value for name, value in os.environ.items() if name not in gone})
