"""What Spark's exceptions say, as it words them."""

from __future__ import annotations

import pytest

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
    told = errors.reason(str(error))
    assert told.startswith("Job aborted due to stage failure: ")
    assert "\tat " not in told
