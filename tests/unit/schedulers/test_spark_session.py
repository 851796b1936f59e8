"""What is decided about a Spark session without one."""

from __future__ import annotations

import pytest

from distributor.schedulers.spark.session import task_python

OURS, NAMED = "/venv/bin/python", "/opt/python"


@pytest.mark.parametrize("master", ["local", "local[4]", "local[*, 3]", "local-cluster[2,1,1024]"])
def test_masters_on_this_machine_run_the_drivers_python(master: str) -> None:
    assert task_python(master, {}, None, OURS) == OURS
    assert task_python(master, {"PYSPARK_PYTHON": ""}, None, OURS) == OURS


@pytest.mark.parametrize("master", ["spark://localhost:7077", "yarn", "k8s://https://a", "local.example"])
def test_other_masters_run_what_spark_takes(master: str) -> None:
    assert task_python(master, {}, None, OURS) is None


@pytest.mark.parametrize("master", ["local[4]", "local-cluster[2,1,1024]", "yarn"])
def test_what_the_user_has_set_wins(master: str) -> None:
    assert task_python(master, {"PYSPARK_PYTHON": NAMED}, None, OURS) is None
    assert task_python(master, {"PYSPARK_PYTHON": NAMED}, "/usr/bin/python3", OURS) is None
    assert task_python(master, {}, NAMED, OURS) == NAMED  # which Spark reads in spark-submit only
    assert task_python(master, {"PYSPARK_DRIVER_PYTHON": "jupyter"}, NAMED, OURS) == NAMED
    assert task_python(master, {"PYSPARK_DRIVER_PYTHON": "jupyter"}, None, OURS) is None


def test_a_driver_that_does_not_know_its_python() -> None:
    assert task_python("local[4]", {}, None, "") is None
