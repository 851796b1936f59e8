"""Checks of what PySpark would start on this machine: a Java that is new enough, and a Spark of its own version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_PATIENCE = 30.0  # seconds for java -version


def problem(pyspark: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why Spark cannot start Java here, and what to do; ``None`` if it can, or if this is not known."""
    if has_spark_env(environ):
        return None
    needed = 8 if pyspark.startswith("3.") else 17
    advice = f"install Java {max(needed, 17)} or later (Debian: apt-get install openjdk-17-jre-headless)"
    home = environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java", path=environ.get("PATH", ""))
    if java is None:
        return f"no Java found (no java on the PATH, and JAVA_HOME is not set): {advice}"
    try:
        ended = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{java} cannot be run ({error}): {'set JAVA_HOME to a folder with bin/java, or ' * bool(home)}{advice}"
    major = major_version(ended.stderr + ended.stdout)
    if major is not None and major < needed:
        where = "JAVA_HOME" if home else "the first on the PATH"
        return (
            f"Java {major} ({java}, {where}) is too old for PySpark {pyspark}, which needs {needed} or later: {advice}"
        )
    return None


def other_spark(pyspark: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why PySpark cannot start the Spark of SPARK_HOME, and what to do. Patch releases may differ."""
    home = environ.get("SPARK_HOME")
    if not home:
        return None
    for jar in Path(home, "jars").glob("spark-core_*.jar"):
        version = jar.stem.partition("-core_")[2].partition("-")[2]  # spark-core_2.13-4.0.1.jar
        if version.split(".")[:2] == pyspark.split(".")[:2]:
            return None
        return (
            f"SPARK_HOME is {home}, which has Spark {version}, but Python imports pyspark {pyspark}: unset SPARK_HOME, "
            f"or install pyspark {version}"
        )
    if Path(home, "bin", "spark-submit").exists():
        return None
    return f"SPARK_HOME is {home}, where there is no Spark, but Python imports pyspark {pyspark}: unset SPARK_HOME"


def major_version(text: str) -> int | None:
    """Return the major version in the output of ``java -version``, ``None`` if the output names no version.

    >>> major_version('openjdk version "17.0.15" 2025-04-15'), major_version('java version "1.8.0_402"')
    (17, 8)
    """
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return None if match is None else int(match[1])


def has_spark_env(environ: Mapping[str, str]) -> bool:
    """Return whether Spark reads a ``spark-env.sh``, which may set JAVA_HOME, and say where the cluster is."""
    home = environ.get("SPARK_HOME")
    folder = environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else None)
    return folder is not None and Path(folder, "spark-env.sh").is_file()
