"""Translates Spark's exceptions to this package's, with the reason in words and no Java stack."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from distributor.errors import (
    DistributorError,
    NodeLostError,
    ResourceError,
    ResultError,
    RunCancelledError,
    StartError,
)
from distributor.outcomes import driver_failures
from distributor.values.job import Job

_SPARKS = ("py4j", "pyspark", "grpc")  # packages whose exceptions come from Spark

#: What Spark says of a job whose tasks its driver could not send to any executor.
#: Source: https://github.com/apache/spark/blob/v4.0.0/core/src/main/scala/org/apache/spark/scheduler/DAGScheduler.scala
_NOT_SENT = r"Task serialization failed|Task not serializable|exceeds max allowed"

#: The class of a Java exception before its message, in a Java stack and as Spark Connect writes it.
_CLASS = r"(?:[\w.$]+(?:Exception|Error): |\([\w.$]+(?:Exception|Error)\) )+"

_CANCELLED = re.compile(r"cancelled|canceled|interrupted|OPERATION_CANCELED", re.IGNORECASE)


def translate(error: Exception, job: Job, hosts: Sequence[str] = (), explanation: str = "") -> DistributorError:
    """Return this package's exception, with the reason in one line, for an exception that ended a job."""
    if type(error).__module__.partition(".")[0] not in _SPARKS:
        return driver_failures.typed(error)
    text = str(error)
    where = f" on {', '.join(hosts)}" if hosts else ""
    if "spark.driver.maxResultSize" in text:
        size = re.search(r"Total size of serialized results of \d+ tasks? \(([^)]*)\)", text)
        return ResultError(
            f"the return values{f' ({size.group(1)})' if size else ''} are larger than spark.driver.maxResultSize "
            "allows, and executors could not send them to the driver directly: let executors connect to the driver "
            "(driver_ports=), raise spark.driver.maxResultSize and spark.driver.memory, or write a checkpoint to "
            "shared storage and return its path"
        )
    if _CANCELLED.search(text):
        return RunCancelledError(f"the Spark job of run {job.label} was cancelled: {reason(text)}")
    if "BarrierJobSlotsNumberCheckFailed" in text or "requires more slots" in text:
        return ResourceError(
            f"num_processes={job.resources.num_processes} needs {job.num_tasks} task slots at once, but the cluster "
            f"has fewer: {reason(text)}"
        )
    if (raised := re.search(r"^\s*distributor\.errors\.StartError: (.*)$", text, re.MULTILINE)) is not None:
        return StartError(raised[1])
    if "PYTHON_VERSION_MISMATCH" in text:
        mismatch = text.partition("[PYTHON_VERSION_MISMATCH] ")[2].partition("\n")[0].strip()
        return StartError(
            f"the Spark job failed{where}: {mismatch} Choose another Python before the session starts (PYSPARK_PYTHON, "
            "spark.pyspark.python)"
        )
    why = f"{reason(text)}. {explanation}" if explanation else reason(text)
    if "Job aborted" in text and not re.search(_NOT_SENT, text):
        return NodeLostError(f"the Spark job of run {job.label} failed{where}: {why}")
    return driver_failures.mishap(StartError(f"Spark failed{where}: {why}"))


def said_of_loss(text: str, tasks: Iterable[str]) -> str:
    """Return what Spark says of a lost task, in one line; ``""`` if it only says that the job was cancelled."""
    first = next(filter(None, tasks), "")
    if not first and _CANCELLED.search(text):
        return ""
    return reason(first or text).rpartition("finished unsuccessfully. ")[2].rstrip(".")


def is_loss(error: Exception) -> bool:
    """Return whether Spark says that it lost a Python worker or an executor, perhaps by the fault of an earlier job.

    Spark may give a task the worker of a previous task, and then end the worker together with that task (SPARK-54217).
    """
    lost = r"Python worker exited unexpectedly|java\.net\.SocketException|ExecutorLostFailure"
    return bool(re.search(lost, str(error)))


def reason(text: str) -> str:
    """Return why a job failed, from a Java exception's text: Spark's reason in one line, and any Python exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    at = next((index for index, line in enumerate(lines) if re.search(r"Job aborted|cancelled|Lost task", line)), 0)
    spark, *after = lines[at:] or [""]
    if spark.endswith("finished unsuccessfully.") and after:  # Spark's line for a barrier task; the next says why
        task = re.sub(_CLASS, "", after[0].partition(". ")[0]).removesuffix("Traceback (most recent call last):")
        spark += f" {task.rstrip(': ')}".rstrip()
    spark = re.sub(rf"^[:\s]*{_CLASS}", "", spark)[:500] or "no reason given"
    in_worker = [
        line for line in lines if re.match(r"(?!org\.|java\.|scala\.|py4j\.)[\w.]*(Error|Exception)(: |$)", line)
    ]
    return f"{spark} (in a Python worker: {in_worker[-1][:500]})" if in_worker else spark
