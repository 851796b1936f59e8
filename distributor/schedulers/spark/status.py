"""What Spark has recorded in a classic session about one job of a run: the Spark jobs with this job's tag."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributor.schedulers.spark.sessions import elements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_MOST_TASKS = 1000  # of a stage that are examined
_LISTENERS_MS = 2000  # until Spark has recorded recent events, such as the ends of tasks


def stages_of(session: SparkSession, tag: str) -> list[Any]:
    """Return Spark's records of the stages of the run whose jobs have this tag."""
    tracker = session.sparkContext._jsc.sc().statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(tag)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job.isDefined() for stage in job.get().stageIds()]
    return [stage.get() for stage in stages if stage.isDefined()]


def have_started(session: SparkSession, stages: Sequence[Any]) -> bool:
    """Return whether Spark has started tasks of the run's last stage. There must be a stage."""
    last = max(stages, key=lambda stage: int(stage.stageId()))
    if last.numActiveTasks() + last.numCompletedTasks() + last.numFailedTasks() > 0:
        return True
    # The status of stages may be seconds old. Spark's scheduler is up to date, but only while a stage runs.
    scheduler = session.sparkContext._jsc.sc().taskScheduler()
    tasks = scheduler.taskSetManagerForAttempt(last.stageId(), last.currentAttemptId())
    return bool(tasks.isDefined() and tasks.get().runningTasks() > 0)


def failures(session: SparkSession, tag: str) -> dict[str, str]:
    """Return the known hosts where tasks of the run have failed, and what Spark says of one task there."""
    failed = [(str(task.host()), task.errorMessage()) for task in _failed_tasks(session, tag)]
    return {host: str(message.get()) if message.isDefined() else "" for host, message in failed}


def longest_failed(session: SparkSession, tag: str, at_most: float) -> float:
    """Return the seconds that the longest failed task took; ``at_most`` if Spark does not know."""
    with suppress(Exception):
        return float(max(task.duration().get() for task in _failed_tasks(session, tag))) / 1000
    return at_most


def running_for(session: SparkSession, tag: str) -> float | None:
    """Return the seconds since Spark started the run's latest task; ``None`` if no started task is known."""
    with suppress(Exception):
        launched = max(float(task.launchTime().getTime()) for task in _tasks(session, tag))
        return max(0.0, time.time() - launched / 1000)
    return None


def are_running(session: SparkSession, tag: str) -> bool:
    """Return whether tasks of the run are running, as far as Spark knows."""
    return any(task.status() == "RUNNING" for task in _tasks(session, tag))


def times(session: SparkSession, tag: str) -> dict[str, float]:
    """Return ``{"stage": when}`` Spark submitted the run's last stage, since the epoch; ``{}`` if it has forgotten."""
    with suppress(Exception):
        return {"stage": max(stage.submissionTime() for stage in stages_of(session, tag)) / 1000}
    return {}


def decommissioned(session: SparkSession, tag: str) -> str | None:
    """Return the host of an executor that Spark is decommissioning while it runs a task of the run.

    Source: https://spark.apache.org/docs/latest/configuration.html (``spark.decommission.enabled``).
    """
    scala = session.sparkContext._jsc.sc()
    scheduler = scala.taskScheduler()
    ids = [str(executor.id()) for executor in elements(scala.statusStore().executorList(True))]
    leaving = {name for name in ids if scheduler.getExecutorDecommissionState(name).isDefined()}
    if not leaving:
        return None
    tasks = [task for task in _tasks(session, tag) if task.status() == "RUNNING"]
    return next((str(task.host()) for task in tasks if str(task.executorId()) in leaving), None)


def _failed_tasks(session: SparkSession, tag: str) -> list[Any]:
    return [task for task in _tasks(session, tag) if task.status() == "FAILED"]


def _tasks(session: SparkSession, tag: str) -> list[Any]:
    """Return Spark's records of the run's tasks, as far as it still has them."""
    tasks = []
    with suppress(Exception):  # the context may have just stopped
        scala = session.sparkContext._jsc.sc()
        with suppress(Exception):  # some listener, such as the event log's, is slow: the store may know enough
            scala.listenerBus().waitUntilEmpty(_LISTENERS_MS)  # events reach the status store late
        store = scala.statusStore()
        for stage in stages_of(session, tag):
            tasks += elements(store.taskList(stage.stageId(), stage.currentAttemptId(), _MOST_TASKS))
    return tasks
