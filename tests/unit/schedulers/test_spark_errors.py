"""What Spark's exceptions say, as it words them."""

from __future__ import annotations

import errno

import pytest
from jobs import make_job

from distributor.errors import NodeLostError, ResultError, StartError
from distributor.schedulers.spark import errors

BARRIER = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a failed barrier \
ResultStage. \
Most recent failure reason: Stage failed because barrier task ResultTask(8, 1) finished unsuccessfully.
{why}
\tat org.apache.spark.api.python.PythonWorkerFactory.create(PythonWorkerFactory.scala:115)
"""


@pytest.mark.parametrize(
    ("why", "lost"),
    [
        ("java.net.SocketException: Socket is closed", True),
        ("java.net.SocketException: Broken pipe (Write failed)", True),
        ("org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)", True),
        ("org.apache.spark.api.python.PythonException: Traceback (most recent call last):", False),
        ("ExecutorLostFailure (executor 1 exited caused by one of the running tasks)", False),
    ],
)
def test_a_worker_that_spark_lost(why: str, lost: bool) -> None:
    error = Exception(BARRIER.format(why=why))
    assert errors.is_lost_worker(error) is lost
    assert errors.is_lost_executor(error) is ("ExecutorLostFailure" in why)
    told = errors.reason(str(error))
    assert told.startswith("Job aborted due to stage failure: ")
    assert "\tat " not in told


def test_values_that_spark_does_not_bring_name_the_setting_and_the_ways_around_it() -> None:
    limit = "spark.driver.maxResultSize (1024.0 MiB)"
    said = f"Total size of serialized results of 9 tasks (1032.0 MiB) is bigger than {limit}"
    job = make_job("r1", 2)
    told = errors.translate(Exception(said), job)
    assert isinstance(told, ResultError)
    assert str(told).startswith("the return values (1032.0 MiB) are larger than spark.driver.maxResultSize allows")
    assert all(word in str(told) for word in ("driver_ports=", "raise spark.driver.maxResultSize", "return its path"))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/gone"), "a file or folder is gone"),
        (RuntimeError("can't start new thread"), "no further thread can be started"),
    ],
)
def test_what_the_driver_itself_lacks_is_no_lost_node(error: Exception, text: str) -> None:
    told = errors.translate(error, make_job("r1", 2))
    assert isinstance(told, StartError)
    assert str(told).startswith(text)
    assert isinstance(errors.translate(ConnectionResetError(104, "reset"), make_job("r1", 2)), NodeLostError)
