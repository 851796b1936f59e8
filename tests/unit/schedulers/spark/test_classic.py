"""How a classic session waits for slots, submits a run's job, again if need be, and says why it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import watch
from jobs import changed, make_job

from distributor.channel.result_receiver import ResultReceiver
from distributor.errors import RunCancelledError, StartError
from distributor.launch.torchrun import Torchrun
from distributor.schedulers.spark import classic
from distributor.schedulers.spark.rows import CROWDED
from distributor.schedulers.spark.slots import Cluster
from distributor.values.job import Function, Job, StatusDetail
from distributor.values.messages import TaskFacts
from distributor.values.outcome import Collected, Failure, NodeReport, Outcome
from distributor.values.placement import NodeFacts

JOB = make_job("r1", 2, Function("train", b"pickled"), False, launch=Torchrun())


CLUSTER = Cluster("spark://host:7077", executor_cores=4)


LOST = RuntimeError("Job aborted: Python worker exited unexpectedly (crashed)")


class Server:
    """A channel that knows what it is told to know of the tasks; ``refused`` placements, then good ones."""

    stop_reason = "a word from the user"
    receiver = ResultReceiver(limit=0)
    exchanged = gathering = False

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
def test_a_lost_worker_restarts_a_job_that_has_not_begun(
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


@pytest.mark.parametrize("how", ["other", "often", "cancelled"])
def test_failures_after_which_no_job_is_submitted_again(
    session: classic.ClassicSession, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    failures = {"other": [RuntimeError("no")], "often": [LOST] * 3, "cancelled": [LOST]}[how]
    left = ends(session, monkeypatch, *failures, [b"Lhost"])
    submit = session._submit
    if how == "cancelled":
        monkeypatch.setattr(session, "_submit", lambda *args: session.cancel() or submit(*args))
    with pytest.raises(RuntimeError, match="no" if how == "other" else "exited unexpectedly"):
        session.collect(JOB, None, Server())
    assert left == [[b"Lhost"]]


def test_nothing_is_submitted_after_a_cancel(session: classic.ClassicSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a large call is broadcast: Spark does not know the job yet, so nothing was cancelled."""
    left = ends(session, monkeypatch, [b"Lhost"])
    session.cancel()
    with pytest.raises(RunCancelledError):
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
    watch.until(lambda: session._held_up == StatusDetail("waiting for executors", ": 1 only", yields=True))
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


def test_what_travels_with_a_classic_job(session: classic.ClassicSession) -> None:
    delivery = session.deliver(JOB)
    assert isinstance(delivery.package, bytes)
    assert (delivery.job, delivery.call) == (JOB, None)
    assert (dict(delivery.parts), delivery.exchange) == ({}, True)
