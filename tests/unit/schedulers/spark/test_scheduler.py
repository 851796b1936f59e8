"""What a run does with a Spark session, classic or Connect, without one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import watch
from at_once import at_once
from jobs import SparkError, changed, make_job

from distributor.channel.result_receiver import ResultReceiver
from distributor.errors import RunCancelledError, StartError
from distributor.launch import Jax, Ray, TensorFlow
from distributor.launch.torchrun import Torchrun
from distributor.outcomes import driver_failures
from distributor.outcomes.driver_failures import is_final
from distributor.schedulers.spark import classic, connect, harmful_settings, scheduler, task
from distributor.schedulers.spark.barrier import Delivery
from distributor.schedulers.spark.harmful_settings import Hazard
from distributor.schedulers.spark.progress import StageProgress
from distributor.schedulers.spark.rows import CROWDED
from distributor.schedulers.spark.slots import Cluster
from distributor.values.job import Function, Job, StatusDetail
from distributor.values.messages import TaskFacts
from distributor.values.outcome import Collected, Failure, Log, NodeReport, Outcome
from distributor.values.placement import NodeFacts

JOB = make_job("r1", 2, Function("train", b"pickled"), False, launch=Torchrun())
CLUSTER = Cluster("spark://host:7077", executor_cores=4)
LOST = RuntimeError("Job aborted: Python worker exited unexpectedly (crashed)")


# Classic sessions


class Server:
    """A channel that knows what it is told to know of the tasks; ``refused`` placements, then good ones."""

    stop_reason = "a word from the user"
    receiver = ResultReceiver(limit=0)

    def __init__(
        self, begun: bool = False, reached: bool = True, refused: int = 0, address: str | None = "127.0.0.1:1"
    ) -> None:
        self.begun, self.reached, self.refused, self.address = begun, reached, refused, address

    def place_by(self, place: Callable[[list[TaskFacts]], Any]) -> None:
        self.place = place

    def start_again(self) -> bool:
        self.refused -= 1
        told = [TaskFacts("", each, "", NodeFacts(each, "a:1", "a", "10.0.0.1", 4000)) for each in range(2)]
        return self.refused >= 0 and self.place(told) is None


class Context:
    """A Spark context that counts what is cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancelJobsWithTag(self, tag: str) -> None:
        self.cancelled.append(tag)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> classic.ClassicSession:
    """One without Spark, which always has slots."""
    monkeypatch.setattr(classic, "_SLOT_POLL", 0.001)
    monkeypatch.setattr(classic, "Slots", lambda *_: SimpleNamespace(ready=lambda: True, room_beside=lambda *_: 2))
    spark: Any = SimpleNamespace(sparkContext=Context())
    return classic.ClassicSession(spark, CLUSTER)


def ends(session: classic.ClassicSession, monkeypatch: pytest.MonkeyPatch, *how: Exception | list[bytes]) -> list[Any]:
    """Have the session's jobs end in these ways. Returns what is left of them."""
    left = list(how)

    def submit(*_: object) -> list[bytes]:
        end = left.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(session, "_submit", submit)
    return left


@pytest.mark.parametrize(
    ("server", "ran", "harmless"),
    [
        pytest.param({}, None, True, id="tasks-wait-for-the-driver"),
        pytest.param({"begun": True}, None, False, id="tasks-have-begun"),
        pytest.param({"reached": False}, 0.1, True, id="nobody-came-and-it-is-too-early-for-others-ways"),
        pytest.param({"reached": False}, 7.0, False, id="nobody-came-but-tasks-may-have-begun-otherwise"),
        pytest.param({"reached": False, "address": None}, 0.1, False, id="nobody-could-come"),
    ],
)
def test_a_worker_that_is_lost(
    session: classic.ClassicSession,
    monkeypatch: pytest.MonkeyPatch,
    server: dict[str, Any],
    ran: float | None,
    harmless: bool,
) -> None:
    monkeypatch.setattr("distributor.schedulers.spark.status.longest_failed", lambda *_: ran)
    left = ends(session, monkeypatch, LOST, [b"Lhost"])
    if harmless:
        assert session.collect(JOB, None, Server(**server)).lost_hosts == ("host",)
        assert left == []
    else:
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            session.collect(JOB, None, Server(**server))
        assert left == [[b"Lhost"]]


@pytest.mark.parametrize("brought", [True, False])
def test_an_agent_that_dies_after_it_has_told_all(brought: bool, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("how", ["other", "often", "cancelled"])
def test_what_does_not_start_a_run_again(
    session: classic.ClassicSession, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    failures = {"other": [RuntimeError("no")], "often": [LOST] * 3, "cancelled": [LOST]}[how]
    left = ends(session, monkeypatch, *failures, [b"Lhost"])
    if how == "cancelled":
        session.cancel()
    with pytest.raises(RuntimeError, match="no" if how == "other" else "exited unexpectedly"):
        session.collect(JOB, None, Server())
    assert left == [[b"Lhost"]]


@pytest.mark.parametrize(
    ("job", "bad", "why"),
    [
        pytest.param(changed(JOB, max_processes_per_node=1), 0, "more ranks on an executor than the 1", id="tasks"),
        pytest.param(replace(JOB, avoided=("a",)), 2, "ranks on a, where two attempts of this run", id="driver"),
    ],
)
def test_a_bad_placement_is_tried_again(
    session: classic.ClassicSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    job: Job,
    bad: int,
    why: str,
) -> None:
    """Tasks refuse it, or the driver."""
    rows = [] if bad else [CROWDED]
    left = ends(session, monkeypatch, rows, rows, [b"Lhost"])
    assert session.collect(job, None, Server(refused=bad)).lost_hosts == ("host",)
    assert left == []
    assert [record.getMessage().partition(why)[1:] for record in caplog.records] == [
        (why, " that it may host; placing run r1 again" if not bad else " have failed; placing run r1 again")
    ]


def test_bad_placements_end_with_the_start_timeout(
    session: classic.ClassicSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(session, monkeypatch, [CROWDED])
    with pytest.raises(StartError, match=r"start_timeout=0 s: Spark put more ranks .* 1 times"):
        session.collect(changed(JOB, max_processes_per_node=1, start_timeout=0.0), None, Server())


def test_a_cancel_ends_the_wait_for_slots(session: classic.ClassicSession, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SimpleNamespace(ready=lambda: False, total=lambda: 1, free=lambda: 1, too_few=lambda there: f"{there} only")
    monkeypatch.setattr(classic, "Slots", lambda *_: slots)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            session.await_slots(JOB)
        except RunCancelledError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    watch.until(lambda: session._held_up == StatusDetail("waiting for executors", ": 1 only"))
    session.cancel()
    waiting.join()
    assert "r1 was cancelled while it waited for slots" in str(raised[0])
    context: Any = session._session.sparkContext
    assert context.cancelled == []


@pytest.mark.parametrize(
    ("there", "free", "stages", "started", "told"),
    [
        (4, 1, [], None, "waiting for 2 task slots: 1 is free; other jobs hold the rest"),
        (4, 0, [], None, "waiting for 2 task slots: none is free; other jobs hold the rest"),
        (4, 4, [], None, "sending the job to Spark"),
        (4, 4, ["stage"], False, "waiting for Spark to start 2 tasks"),
        (4, 0, ["stage"], False, "waiting for 2 task slots: none is free; other jobs hold the rest"),
        (4, 0, ["stage"], True, None),
        # Executors have gone, or are too small: nobody holds their slots.
        (0, 0, ["stage"], False, "waiting for executors: 0 only"),
        (1, 0, [], None, "waiting for executors: 1 only"),
        (2, 1, [], None, "waiting for 2 task slots: 1 is free"),  # and no task runs
    ],
)
def test_what_a_classic_run_waits_for(
    session: classic.ClassicSession,
    monkeypatch: pytest.MonkeyPatch,
    there: int,
    free: int,
    stages: list[str],
    started: bool,
    told: str | None,
) -> None:
    slots = SimpleNamespace(
        free=lambda: free, total=lambda: there, busy=lambda: there == 4, too_few=lambda total: f"{total} only"
    )
    monkeypatch.setattr(classic, "Slots", lambda *_: slots)
    monkeypatch.setattr("distributor.schedulers.spark.status.stages_of", lambda *_: stages)
    monkeypatch.setattr(
        "distributor.schedulers.spark.status.have_started", lambda _, them: them.index("stage") or started
    )
    step = session.waiting_for(JOB)
    assert (step if step is None else str(step)) == told


def report(*failures: Failure, error: tuple[str, str] | None = None) -> NodeReport:
    outcomes = tuple(Outcome(failure.rank, "a", "failed", failure=failure) for failure in failures)
    return NodeReport(0, "a", outcomes, error=error)


FIRST = Failure(1, 1, "a", "ValueError", "ValueError: no\nmore", time=1.0)
LATER = Failure(0, 0, "a", "signal", "killed by SIGTERM", time=2.0)


@pytest.mark.parametrize(
    ("collected", "words"),
    [
        (Collected((report(error=("StartError", "no torch here\nmore")),)), "no torch here"),
        (Collected((report(LATER, FIRST),), lost_hosts=("a",)), "rank 1 on a failed: ValueError: no"),
        (Collected(lost_hosts=("a",)), "lost the node on a"),
        (Collected(), "the ranks were stopped: a word from the user"),
    ],
)
def test_why_a_job_is_shown_as_failed(collected: Collected, words: str) -> None:
    told = classic._why(collected, Server.stop_reason)
    assert told.startswith(words)
    assert "\n" not in told


def test_a_run_that_nobody_says_why_it_was_stopped() -> None:
    assert classic._why(Collected(), "") == "the ranks were stopped: the run was cancelled, or a node was lost"


# Spark Connect


class Remote:
    """The session of a client, which counts what is sent."""

    def __init__(self) -> None:
        self.sent: dict[str, bytes] = {}
        self.told: list[StatusDetail | None] = []
        self.interrupted: list[str] = []
        self.session = connect.ConnectSession(self)

    def addArtifacts(self, path: str, file: bool) -> None:
        assert file
        assert Path(path).name not in self.sent
        self.sent[Path(path).name] = Path(path).read_bytes()
        self.told.append(self.session.waiting_for(JOB))

    def interruptTag(self, tag: str) -> None:
        self.interrupted.append(tag)


def test_large_parts_are_sent_once_and_under_names_of_their_own() -> None:
    remote = Remote()
    large = changed(JOB, target=Function("train", b"x" * (1 << 20) + b"x"))
    first, again = remote.session.deliver(large), remote.session.deliver(large)
    assert first == again
    assert remote.sent[first.parts["function"]] == large.target.pickled
    assert isinstance(first.job.target, Function)
    assert first.job.target.pickled == b""
    assert isinstance(first.package, str)
    assert remote.sent[first.package].startswith(b"PK")
    assert [str(step).partition(" ")[0] for step in remote.told] == ["sending", "sending"]
    assert remote.session.waiting_for(JOB) is None
    assert remote.session.deliver(JOB).parts == {}


def test_what_travels_with_a_classic_job(session: classic.ClassicSession) -> None:
    delivery = session.deliver(JOB)
    assert isinstance(delivery.package, bytes)
    assert (delivery.job, dict(delivery.parts), delivery.exchange) == (JOB, {}, True)


def test_a_query_is_cancelled_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote()
    remote.session.cancel()
    assert remote.interrupted == []
    monkeypatch.setattr(remote.session, "_submit", lambda *_: [b"Lhost"])
    assert remote.session.collect(JOB, None, Server()).lost_hosts == ("host",)
    remote.session.cancel()
    assert remote.interrupted == ["distributor-r1"]


def test_progress_tells_whether_tasks_have_started() -> None:
    progress = StageProgress(2)
    stage, other = SimpleNamespace(num_tasks=2), SimpleNamespace(num_tasks=3)
    progress([other], 3, "q", False)
    assert not progress.waiting
    progress([stage], 0, "q", False)
    assert progress.waiting
    progress([stage], 1, "q", False)
    progress([stage], 0, "q", False)
    assert not progress.waiting


# Both


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
    shipment = scheduler._shipment(job, Delivery(JOB, {"function": "f"}, "zip", False, 7), None, "host", b"s")
    assert (shipment["job_id"], shipment["parts"], shipment["package"]) == ("r1", {"function": "f"}, "zip")
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
    shipment = scheduler._shipment(changed(JOB, launch=launch), Delivery(JOB, {}, "zip", False, 7), None, "h", b"")
    context = SimpleNamespace(partitionId=lambda: 0, resources=dict, cpus=lambda: 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        facts = task._facts(context, "host:1", "127.0.0.1", [listener], shipment)
    assert facts.versions.keys() == {"Python", "torch", *([package] if package else [])}
    assert all(facts.versions[name].startswith("1.2 of") for name in facts.versions.keys() - {"Python"})


@pytest.mark.parametrize("own", [False, True])
def test_what_somebody_else_has_cancelled_is_final(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
