"""What Spark's exceptions say, as it words them."""

from __future__ import annotations

import errno
import pickle

import pytest
from jobs import SparkError, make_job

from distributor.errors import NodeLostError, ResultError, StartError
from distributor.outcomes import driver_failures
from distributor.schedulers.spark import exceptions

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
        ("ExecutorLostFailure (executor 1 exited caused by one of the running tasks)", True),
    ],
)
def test_a_worker_or_executor_that_spark_lost(why: str, lost: bool) -> None:
    error = Exception(BARRIER.format(why=why))
    assert exceptions.is_loss(error) is lost
    told = exceptions.reason(str(error))
    assert told.startswith("Job aborted due to stage failure: ")
    assert "\tat " not in told


def test_values_that_spark_does_not_bring_name_the_setting_and_the_ways_around_it() -> None:
    limit = "spark.driver.maxResultSize (1024.0 MiB)"
    said = f"Total size of serialized results of 9 tasks (1032.0 MiB) is bigger than {limit}"
    job = make_job("r1", 2)
    told = exceptions.translate(SparkError(said), job)
    assert isinstance(told, ResultError)
    assert str(told).startswith("the return values (1032.0 MiB) are larger than spark.driver.maxResultSize allows")
    assert all(word in str(told) for word in ("driver_ports=", "raise spark.driver.maxResultSize", "return its path"))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/gone"), "a file or folder is gone"),
        (RuntimeError("can't start new thread"), "no further thread can be started"),
        (ConnectionResetError(104, "reset"), "ConnectionResetError: [Errno 104] reset"),
        (ValueError("it is not registered for pickle by value"), "ValueError: it is not registered"),
        (pickle.PicklingError("Could not serialize object"), "PicklingError: Could not serialize object"),
        (RuntimeError("cannot schedule new futures after shutdown"), "RuntimeError: cannot schedule new futures"),
        (InterruptedError(4, "Interrupted system call"), "InterruptedError: [Errno 4] Interrupted"),
        (SparkError("There is no active session"), "Spark failed: There is no active session"),
        (SparkError("java.lang.OutOfMemoryError: Java heap space"), "Spark failed: Java heap space"),
        (SparkError("UNAVAILABLE: failed to connect to all addresses"), "Spark failed: UNAVAILABLE: failed"),
        (
            SparkError("Job aborted due to stage failure: Task serialization failed: java.lang.OutOfMemoryError"),
            "Spark failed: Job aborted due to stage failure: Task serialization failed",
        ),
    ],
)
def test_a_failure_of_the_driver_itself_is_no_lost_node(error: Exception, text: str) -> None:
    told = exceptions.translate(error, make_job("r1", 2))
    assert type(told) is StartError
    assert str(told).startswith(text)
    assert driver_failures.is_mishap(told)


@pytest.mark.parametrize("why", ["ExecutorLostFailure (executor 1 exited)", "no reason that is known here"])
def test_a_job_that_spark_gives_up_is_a_lost_node(why: str) -> None:
    told = exceptions.translate(SparkError(BARRIER.format(why=why)), make_job("r1", 2), ["host-b"])
    assert type(told) is NodeLostError
    assert str(told).startswith("the Spark job of run r1 failed on host-b: Job aborted due to stage failure")
    assert why.partition(" ")[0] in str(told)


KILLED = "ExecutorLostFailure (executor 0 exited unrelated to the running tasks) Reason: Executor killed by driver."
IDLE = "Python worker process terminated due to idle timeout (timeout: 5 seconds)"
CANCELLED = "org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job 0 cancelled part of cancelled job tags d-1"
CLOSED = "(org.apache.spark.SparkSQLException) [INVALID_HANDLE.SESSION_CLOSED] Session was closed. SQLSTATE: 08003"


@pytest.mark.parametrize(
    ("text", "tasks", "said"),
    [
        (BARRIER.format(why=KILLED), [], KILLED.rstrip(".")),
        (BARRIER.format(why=f"org.apache.spark.api.python.PythonWorkerException: {IDLE}"), [], IDLE),
        # The run itself has cancelled the job, since it has lost a node: the task has failed before.
        (CANCELLED, [f"{KILLED}\n\tat nowhere"], KILLED.rstrip(".")),
        (CANCELLED, [], ""),
        (CLOSED, [], "[INVALID_HANDLE.SESSION_CLOSED] Session was closed. SQLSTATE: 08003"),
    ],
)
def test_why_spark_lost_a_task(text: str, tasks: list[str], said: str) -> None:
    assert exceptions.said_of_loss(text, tasks) == said


#: What a worker says if Spark ends its ``allGather``, in Spark 4.3; in Spark 3.5, without the first words.
GATHERING = """org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown from the Python \
worker: Traceback (most recent call last):
  File "pyspark.zip/pyspark/taskcontext.py", line 493, in allGather
    return _load_from_socket(self._conn_info, self._secret, ALL_GATHER_FUNCTION, message)
  File "pyspark.zip/pyspark/serializers.py", line 604, in read_int
    raise EOFError
EOFError
 SQLSTATE: 38000"""


def test_an_exception_without_words_is_named() -> None:
    told = exceptions.reason(BARRIER.format(why=GATHERING))
    assert told.endswith("(in a Python worker: EOFError)")
    assert "Traceback" not in told
    assert "explained" in str(
        exceptions.translate(SparkError(BARRIER.format(why=KILLED)), make_job("r1"), (), "explained")
    )
