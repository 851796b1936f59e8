"""What a run does with a Spark session, classic or Connect, without one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from at_once import at_once
from jobs import SparkError, changed, make_job

from distributor.errors import RunCancelledError, StartError
from distributor.launch import Jax, Ray, TensorFlow
from distributor.launch.torchrun import Torchrun
from distributor.outcomes import driver_failures
from distributor.outcomes.driver_failures import is_final
from distributor.schedulers.spark import harmful_settings, scheduler, task
from distributor.schedulers.spark.barrier import Delivery
from distributor.schedulers.spark.harmful_settings import Hazard
from distributor.schedulers.spark.slots import Cluster
from distributor.values.job import Function
from distributor.values.outcome import Collected, Log, NodeReport

JOB = make_job("r1", 2, Function("train", b"pickled"), False, launch=Torchrun())
CLUSTER = Cluster("spark://host:7077", executor_cores=4)


@pytest.mark.parametrize("brought", [True, False])
def test_an_agent_that_dies_after_its_results_arrived_fails_no_run(
    brought: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task has nothing to bring then. Output and times are those that the job brought."""
    spark = Collected(lost_hosts=("host",), logs=(Log(0, 1, 0, b"line"),), times={"submitted": 1.0})
    channel = Collected((NodeReport(0, "host", passed=True),), {0: [b"value"]})
    server: Any = SimpleNamespace(returned=lambda patience: channel if brought else None)
    completed = scheduler._completed(spark, JOB, server)
    if brought:
        assert completed == Collected(channel.reports, channel.values, (), spark.logs, spark.times)
        assert "an agent on host died after training had ended, but all results have reached the driver" in caplog.text
    else:
        assert completed is spark


LOAD_TASK = """
import pickle, sys, zlib
assert pickle.loads(zlib.decompress(sys.stdin.buffer.read())).__name__ == "run_task"
assert not any(name.partition(".")[0] == "distributor" for name in sys.modules)
"""


@pytest.mark.parametrize("of_user", [False, True])
def test_first_runs_at_the_same_moment_pickle_the_task_by_value(of_user: bool) -> None:
    """And a registration that is the user's own stays."""
    import pyspark.cloudpickle as spark_cloudpickle

    import distributor

    if of_user:
        spark_cloudpickle.register_pickle_by_value(distributor)
    scheduler._portable_task.cache_clear()
    try:
        tasks = [*at_once(*[scheduler._portable_task] * 8), scheduler._portable_task()]
        assert spark_cloudpickle.list_registry_pickle_by_value() == ({"distributor"} if of_user else set())
    finally:
        if of_user:
            spark_cloudpickle.unregister_pickle_by_value(distributor)
    assert [type(packed) for packed in tasks] == [bytes] * 9
    for packed in {*tasks}:  # in a folder from which the package cannot be imported
        subprocess.run([sys.executable, "-c", LOAD_TASK], input=packed, cwd=os.sep, check=True)


@pytest.mark.parametrize(("module", "kind"), [("pyspark.sql.session", "Classic"), ("pyspark.sql.connect.x", "Connect")])
def test_the_kind_of_session_decides(monkeypatch: pytest.MonkeyPatch, module: str, kind: str) -> None:
    monkeypatch.setattr("distributor.schedulers.spark.slots.cluster_of", lambda _: CLUSTER)
    of_kind = type("SparkSession", (), {"__module__": module})()
    assert type(scheduler.SparkScheduler(of_kind)._barrier).__name__ == f"{kind}Session"


def test_a_shipment_has_what_the_job_and_the_kind_of_session_say() -> None:
    job = changed(JOB, grace_period=3.0, use_gpu=True)
    shipment = scheduler._shipment(job, Delivery(JOB, "c", {"working_dir": "w"}, "zip", False, 7), None, "host", b"s")
    assert (shipment["job_id"], shipment["call"], shipment["parts"]) == ("r1", "c", {"working_dir": "w"})
    assert shipment["package"] == "zip"
    assert (shipment["exchange"], shipment["chunk"], shipment["gpu"]) == (False, 7, "gpu")
    assert shipment["patience"] > job.deadlines.grace_period
    assert shipment["seal"] == b"s"


@pytest.mark.parametrize(
    ("launch", "package"), [(Torchrun(), None), (Jax(), "jax"), (TensorFlow(), "tensorflow"), (Ray(), "ray")]
)
def test_tasks_state_the_versions_of_what_the_launch_path_needs(
    launch: Any, package: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.2 of {name}")
    shipment = scheduler._shipment(
        changed(JOB, launch=launch), Delivery(JOB, None, {}, "zip", False, 7), None, "h", b""
    )
    context = SimpleNamespace(partitionId=lambda: 0, resources=dict, cpus=lambda: 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        facts = task._facts(context, "host:1", "127.0.0.1", [listener], shipment)
    assert facts.versions.keys() == {"Python", "torch", *([package] if package else [])}
    assert all(facts.versions[name].startswith("1.2 of") for name in facts.versions.keys() - {"Python"})


@pytest.mark.parametrize("own", [False, True])
def test_a_job_that_was_cancelled_in_spark_is_not_submitted_again(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that the run itself ends, for example after a lost node, may be followed by another one."""
    monkeypatch.setattr("distributor.schedulers.spark.slots.cluster_of", lambda _: CLUSTER)
    made = scheduler.SparkScheduler(type("SparkSession", (), {"__module__": "pyspark.sql.session"})())
    made._barrier = SimpleNamespace(cancel=lambda: False, ended=lambda job: None, failures=dict)  # type: ignore[assignment]

    def run(*_: Any) -> Collected:
        if own:
            made.cancel()
        raise SparkError("Job 3 cancelled as part of cancellation of all jobs")

    monkeypatch.setattr(made, "_run", run)
    server: Any = SimpleNamespace(returned=lambda patience: None, forget_returned=lambda: None)
    with pytest.raises(RunCancelledError) as caught:
        made.run(JOB, server)
    assert is_final(caught.value) is not own


def test_an_error_of_the_driver_keeps_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.schedulers.spark.slots.cluster_of", lambda _: CLUSTER)
    made = scheduler.SparkScheduler(type("SparkSession", (), {"__module__": "pyspark.sql.session"})())
    made._barrier = SimpleNamespace(ended=lambda job: None, failures=dict)  # type: ignore[assignment]
    own = ValueError("our fault")

    def run(*_: Any) -> Collected:
        raise own

    monkeypatch.setattr(made, "_run", run)
    server: Any = SimpleNamespace(returned=lambda patience: None, forget_returned=lambda: None)
    with pytest.raises(StartError, match="^ValueError: our fault$") as caught:
        made.run(JOB, server)
    assert caught.value.__cause__ is own


def test_a_lost_task_is_explained_also_in_a_later_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.schedulers.spark.slots.cluster_of", lambda _: CLUSTER)
    made = scheduler.SparkScheduler(type("SparkSession", (), {"__module__": "pyspark.sql.session"})())
    row = Hazard(("a.b",), bool, "Spark ends executors", "Unset {0}", said="code 57")
    made._found = harmful_settings.find("4.3.0", [row.where], {"a.b": "1"}.get, [row])
    lost = "ExecutorLostFailure (executor 0 exited) Reason: Command exited with code 57"
    for at in (made, made.again(JOB)):
        at._barrier = SimpleNamespace(ended=lambda job: None, failures=lambda: {"host-a": lost})  # type: ignore[assignment]
        told = at._translated(RuntimeError("Job 3 cancelled"), JOB)
        assert driver_failures.loss_of(told) == driver_failures.Loss(lost, "a.b is 1: Spark ends executors. Unset a.b")
