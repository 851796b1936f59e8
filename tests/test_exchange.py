"""How tasks learn what all of them have to say: over the channel, or all of them another way."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
import trainings
import watch
from listeners import Listener
from proxy import Proxy

from distributor import TorchDistributor
from distributor.channel import connections, requests, server
from distributor.channel.facts import Facts
from distributor.channel.server import ChannelServer
from distributor.values.messages import AllFacts, TaskFacts
from distributor.values.plan import Endpoint

Entries = list[dict[str, Any]]


class Tasks:
    """Tasks of a barrier stage as threads. ``gathered`` counts those that used Spark's own way."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(2 * count)
        self._barrier = threading.Barrier(count)
        self._texts: list[str] = []
        self.gathered = 0

    def _gather(self, text: str) -> list[str]:
        self._texts.append(text)
        self._barrier.wait(watch.DEADLINE)
        self.gathered += 1
        return list(self._texts)

    def start(self, partition: int, at: Endpoint | None, attempt: int = 0, patience: float = 30.0) -> Future[Entries]:
        where = None if at is None else (at.host, at.port, at.certificate, at.token)
        mine = {"partition": partition, "facts": {"attempt": attempt}}
        return self._pool.submit(self._exchange, mine, ("", 100 * attempt + partition), where, patience)

    def _exchange(self, mine: Any, attempt: int, at: Any, patience: float) -> Entries:
        gathered = self.gathered
        everyone, reached = requests.exchange(mine, attempt, at, self._gather, patience)
        assert reached == (self.gathered == gathered)
        return everyone


@pytest.fixture
def serving() -> Iterator[Callable[[int], tuple[ChannelServer, Endpoint]]]:
    servers = []

    def serve(tasks: int) -> tuple[ChannelServer, Endpoint]:
        it = ChannelServer(Listener(), tasks=tasks)
        servers.append(it.__enter__())
        return it, it.listen("127.0.0.1", "127.0.0.1")

    yield serve
    for it in servers:
        it.__exit__()


def everyone(count: int, attempt: int = 0) -> Entries:
    return [{"partition": partition, "facts": {"attempt": attempt}} for partition in range(count)]


def test_all_learn_all_from_the_driver(serving: Any) -> None:
    _, at = serving(3)
    tasks = Tasks(3)
    told = [tasks.start(partition, at) for partition in (2, 0, 1)]
    assert [it.result(watch.DEADLINE) for it in told] == [everyone(3)] * 3
    assert tasks.gathered == 0


def test_without_a_driver_all_ask_spark() -> None:
    tasks = Tasks(3)
    told = [tasks.start(partition, None) for partition in range(3)]
    assert [it.result(watch.DEADLINE) for it in told] == [everyone(3)] * 3
    assert tasks.gathered == 3


def test_if_one_cannot_reach_the_driver_all_ask_spark(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FACTS_TIMEOUT", 0.2)
    _, at = serving(3)
    with Proxy("127.0.0.1", at.port) as closed:
        port = closed.port
    nowhere = Endpoint(at.host, port, at.certificate, at.token)
    tasks = Tasks(3)
    told = [tasks.start(0, at), tasks.start(1, nowhere), tasks.start(2, at)]
    assert [it.result(watch.DEADLINE) for it in told] == [everyone(3)] * 3
    assert tasks.gathered == 3


def test_one_that_comes_too_late_is_sent_to_spark_as_well(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FACTS_TIMEOUT", 0.1)
    it, at = serving(2)
    tasks = Tasks(2)
    first = tasks.start(0, at)
    watch.until(lambda: it._facts.given_up)
    second = tasks.start(1, at)
    assert first.result(watch.DEADLINE) == second.result(watch.DEADLINE) == everyone(2)
    assert tasks.gathered == 2


def test_tasks_that_are_placed_badly_end_and_others_may_come(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FACTS_TIMEOUT", 0.1)
    it, at = serving(2)
    placed: list[Any] = []
    it.accept_if(lambda facts: placed.append(facts) or len(placed) == 2)
    tasks = Tasks(2)
    for told in [tasks.start(partition, at, attempt=1) for partition in range(2)]:
        with pytest.raises(requests.StoppedError, match="the driver has refused Spark's placement of the ranks"):
            told.result(watch.DEADLINE)
    watch.until(lambda: not it._facts.here)
    assert not it.begun and it.start_again() and not it.start_again()
    again = [tasks.start(partition, at, attempt=2) for partition in range(2)]
    assert [told.result(watch.DEADLINE) for told in again] == [everyone(2, attempt=2)] * 2
    assert it.begun and tasks.gathered == 0
    assert [sorted(entry["facts"]["attempt"] for entry in facts) for facts in placed] == [[1, 1], [2, 2]]


def test_a_broken_connection_is_made_again(serving: Any) -> None:
    it, at = serving(2)
    tasks = Tasks(2)
    with Proxy("127.0.0.1", at.port) as proxy:
        first = tasks.start(0, Endpoint(at.host, proxy.port, at.certificate, at.token))
        watch.until(lambda: len(it._facts.here) == 1)
        proxy.reset()
        watch.until(lambda: proxy.connections == 2 and len(it._facts.here) == 1)
        second = tasks.start(1, at)
        assert first.result(watch.DEADLINE) == second.result(watch.DEADLINE) == everyone(2)
    assert tasks.gathered == 0


def test_an_answer_that_was_missed_is_given_again(serving: Any) -> None:
    _, at = serving(2)
    tasks = Tasks(2)
    told = [tasks.start(partition, at) for partition in range(2)]
    assert [it.result(watch.DEADLINE) for it in told] == [everyone(2)] * 2
    assert tasks.start(0, at).result(watch.DEADLINE) == everyone(2)


def test_tasks_that_spark_starts_again_learn_of_each_other(serving: Any) -> None:
    _, at = serving(2)
    tasks = Tasks(2)
    for attempt in range(2):
        told = [tasks.start(partition, at, attempt) for partition in range(2)]
        assert [it.result(watch.DEADLINE) for it in told] == [everyone(2, attempt)] * 2


def test_the_facts_of_a_task_that_has_ended_do_not_count(serving: Any) -> None:
    """Its executor was killed: Spark starts all tasks again, and those of before must not be mixed with them."""
    it, at = serving(2)
    line = connections.connect((at.host, at.port, at.certificate, at.token), 5.0)
    line.sendall(connections.pack(TaskFacts("", 0, 0, {"facts": "old"})))
    watch.until(lambda: len(it._facts.here) == 1)
    line.close()
    watch.until(lambda: not it._facts.here)
    tasks = Tasks(2)
    told = [tasks.start(partition, at, 1) for partition in (1, 0)]
    assert [each.result(watch.DEADLINE) for each in told] == [everyone(2, 1)] * 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(("a", 1, 11), [("a", 0, 13), ("a", 1, 12)], id="of-a-wave"),
        pytest.param(("a", 1, 11), [("b", 0, 12), ("b", 1, 13)], id="of-two-waves"),
    ],
)
def test_attempts_are_not_mixed(old: tuple[str, int, int], new: list[tuple[str, int, int]]) -> None:
    """Those of before may still be there when all tasks have been started again."""
    facts, writers = Facts(2), [cast(Any, object()) for _ in range(3)]
    facts.take(writers[0], told(*old, {"old": 1}))
    assert facts.told == 1
    facts.take(writers[1], told(*new[0], {"new": 0}))
    assert facts.answer() is None
    facts.take(writers[2], told(*new[1], {"new": 1}))
    assert facts.told == 2
    answer = facts.answer()
    assert isinstance(answer, AllFacts)
    assert sorted(answer.facts, key=str) == [{"new": 0}, {"new": 1}]


def told(stage_attempt: str, partition: int, attempt: int, facts: dict[str, Any]) -> TaskFacts:
    return TaskFacts(stage_attempt, attempt, partition, facts)


def test_tasks_of_a_wave_before_are_not_answered() -> None:
    facts, writers = Facts(1), [cast(Any, object()) for _ in range(2)]
    facts.take(writers[0], told("b", 0, 5, {"new": 0}))
    facts.take(writers[1], told("a", 0, 4, {"old": 0}))
    assert facts.waiting() == [writers[0]]
    assert facts.answer() == AllFacts(({"new": 0},))


def test_a_stage_that_is_started_again_in_part_ends(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have begun with facts of before, and cannot be told to ask Spark."""
    monkeypatch.setattr(server, "_FACTS_TIMEOUT", 0.2)
    _, at = serving(2)
    tasks = Tasks(2)
    for it in [tasks.start(partition, at) for partition in range(2)]:
        it.result(watch.DEADLINE)
    with pytest.raises(requests.StoppedError, match="Spark has started the tasks again"):
        tasks.start(0, at, 1).result(watch.DEADLINE)


def test_sparks_tasks_exchange_their_facts_over_the_channel(spark: Any) -> None:
    """How Spark numbers them is as it is thought to be."""
    for _ in range(3):
        run = TorchDistributor(4, False, False).submit(trainings.all_reduce)
        assert run.results() == [10.0] * 4
        assert run._supervisor.server is not None
        assert run._supervisor.server._facts.settled


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_is_stopped_does_not_begin(serving: Any, when: str) -> None:
    it, at = serving(2)
    tasks = Tasks(2)
    if when == "before":
        it.stop("cancelled")
    waiting = tasks.start(0, at)
    if when == "after":
        watch.until(lambda: len(it._facts.here) == 1)
        it.stop("cancelled")
    with pytest.raises(requests.StoppedError, match="cancelled"):
        waiting.result(watch.DEADLINE)


def test_a_driver_that_goes_is_given_up() -> None:
    it = ChannelServer(Listener(), tasks=2)

    async def vanish() -> None:
        it._tls_listener.close()
        for writer in it._facts.waiting():
            writer.transport.abort()

    with it:
        at = it.listen("127.0.0.1", "127.0.0.1")
        waiting = Tasks(2).start(0, at, patience=0.5)
        watch.until(lambda: len(it._facts.here) == 1)
        it._call(vanish()).result()
        start = time.monotonic()
        with pytest.raises(requests.StoppedError, match=r"heard nothing from the driver for 0\.5 s"):
            waiting.result(watch.DEADLINE)
        assert time.monotonic() - start < watch.DEADLINE


def test_tasks_learn_that_their_job_has_ended() -> None:
    it = ChannelServer(Listener(), tasks=2)
    with it:
        at = it.listen("127.0.0.1", "127.0.0.1")
        waiting = Tasks(2).start(0, at, patience=600.0)
        watch.until(lambda: len(it._facts.here) == 1)
    with pytest.raises(requests.StoppedError, match="the job has ended"):
        waiting.result(watch.DEADLINE)


def test_facts_that_make_no_sense_do_no_harm(serving: Any) -> None:
    _, at = serving(1)
    told = {"kind": "TaskFacts", "wave": "", "attempt": 0, "partition": 0, "facts": {}}
    for wrong in ({"facts": []}, {"facts": None}, {"partition": "x"}, {"attempt": True}, {"more": 1}, {"kind": "Hi"}):
        with connections.connect((at.host, at.port, at.certificate, at.token), 5.0) as line:
            body = json.dumps({**told, **wrong}).encode()
            line.sendall(struct.pack("!IB", len(body), 1) + body)
            assert line.recv(1) == b""
    assert Tasks(1).start(0, at).result(watch.DEADLINE) == everyone(1)
