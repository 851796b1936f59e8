"""A rank starts no JVM unless the user allows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

RANK = """
import sys
{before}
from distributor.rank import spark
spark.refuse()
import pyspark.java_gateway
pyspark.java_gateway.Popen = lambda *_, **__: print("started") or sys.exit()
from {module} import {name}
try:
    {code}
except RuntimeError as error:
    print(error)
"""

TEXT = "a SparkSession cannot be created inside a rank: each rank would start a JVM of its own. "


@pytest.mark.parametrize("before", ["", "import pyspark.sql"])
@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        ("pyspark.sql", "SparkSession", "SparkSession.builder.master('local[1]').getOrCreate()"),
        ("pyspark", "SparkContext", "SparkContext('local[1]')"),
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_a_session_in_a_rank(before: str, module: str, name: str, code: str, allowed: bool) -> None:
    command = [sys.executable, "-c", RANK.format(before=before, module=module, name=name, code=code)]
    env, root = {"DISTRIBUTOR_ALLOW_SPARK": "1"} if allowed else {}, Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=root, check=False)
    assert done.stdout.startswith("started" if allowed else TEXT), done.stderr
    assert allowed or 'pass env={"DISTRIBUTOR_ALLOW_SPARK": "1"}' in done.stdout


FILES = """
{before}
from distributor.rank import spark
spark.refuse()
from pyspark import SparkFiles
try:
    SparkFiles.{call}
except RuntimeError as error:
    print(error)
SparkFiles._is_running_on_worker, SparkFiles._root_directory = True, "/files"
print(SparkFiles.{call})
"""


@pytest.mark.parametrize("before", ["", "import pyspark.sql"])
@pytest.mark.parametrize(("call", "path"), [("get('a.txt')", "/files/a.txt"), ("getRootDirectory()", "/files")])
def test_sparks_files_in_a_rank(before: str, call: str, path: str) -> None:
    """What has Spark's files, such as a context of the rank's own, still gets them."""
    command = [sys.executable, "-c", FILES.format(before=before, call=call)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    told, found = done.stdout.splitlines()
    assert told.startswith("SparkFiles works in Spark's own tasks only") and "working_dir=" in told
    assert found == path
