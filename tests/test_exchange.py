"""How tasks learn what all of them have to say: over the channel, or all of them another way."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import trainings
import watch
from listeners import Listener
from proxy import Proxy
from sessions import MASTERS

from distributor import TorchDistributor
from distributor.channel import connections, requests, server, tasks as of_tasks
from distributor.channel.facts import Facts
from distributor.channel.server import ChannelServer
from distributor.values import messages
from distributor.values.messages import AllNodes, Placed, TaskFacts
from distributor.values.placement import Node, NodeFacts, Placement
from distributor.values.plan import Endpoint

#: What a task has been told of the others.
Told = Placed


def fact(partition: int, attempt: int = 0) -> TaskFacts:
    """The facts of one of the tasks that run two on an executor."""
    executor = f"host-{partition // 2}"
    facts = NodeFacts(partition, f"{executor}:1", executor, "10.0.0.1", 4000 + attempt)
    return TaskFacts("", 100 * attempt + partition, f"task {partition} of attempt {attempt}", facts)


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

    def start(self, partition: int, at: Endpoint | None, attempt: int = 0, patience: float = 30.0) -> Future[Told]:
        where = None if at is None else (at.host, at.port, at.certificate, at.token)
        return self._pool.submit(self._exchange, fact(partition, attempt), where, patience)

    def _exchange(self, mine: TaskFacts, at: Any, patience: float) -> Told:
        gathered = self.gathered
        answer, everyone = requests.exchange(mine, at, self._gather, patience)
        assert bool(answer) == (self.gathered == gathered) != bool(everyone)
        told = answer[0] if answer else of_tasks.among(everyone)[mine.partition]
        assert isinstance(told, Placed)
        return told


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


def told_to(*partitions: int, attempt: int = 0) -> list[Told]:
    """What these tasks must know of the others: the leader of their executor."""
    return [Placed(f"task {partition // 2 * 2} of attempt {attempt}") for partition in partitions]


def test_all_learn_all_from_the_driver(serving: Any) -> None:
    _, at = serving(3)
    tasks = Tasks(3)
    told = [tasks.start(partition, at) for partition in (2, 0, 1)]
    assert [it.result(watch.DEADLINE) for it in told] == told_to(2, 0, 1)
    assert tasks.gathered == 0


def test_without_a_driver_all_ask_spark() -> None:
    tasks = Tasks(3)
    told = [tasks.start(partition, None) for partition in range(3)]
    assert [it.result(watch.DEADLINE) for it in told] == told_to(0, 1, 2)
    assert tasks.gathered == 3


def test_if_one_cannot_reach_the_driver_all_ask_spark(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FACTS_TIMEOUT", 0.2)
    _, at = serving(3)
    with Proxy("127.0.0.1", at.port) as closed:
        port = closed.port
    nowhere = Endpoint(at.host, port, at.certificate, at.token)
    tasks = Tasks(3)
    told = [tasks.start(0, at), tasks.start(1, nowhere), tasks.start(2, at)]
    assert [it.result(watch.DEADLINE) for it in told] == told_to(0, 1, 2)
    assert tasks.gathered == 3


def test_the_wait_for_missing_tasks_begins_again_with_each_that_comes(serving: Any) -> None:
    """The driver cannot answer thousands of tasks at once."""
    it, at = serving(3)
    tasks = Tasks(3)
    waits = []
    for partition in range(2):
        tasks.start(partition, at)
        watch.until(lambda: len(it._facts.here) == partition + 1 and it._facts.fallback not in waits)
        waits.append(it._facts.fallback)
    assert [wait.cancelled() for wait in waits] == [True, False]
    assert tasks.start(2, at).result(watch.DEADLINE) == told_to(2)[0]
    assert it._facts.fallback is None and waits[1].cancelled()


def test_one_that_comes_too_late_is_sent_to_spark_as_well(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FACTS_TIMEOUT", 0.1)
    it, at = serving(2)
    tasks = Tasks(2)
    first = tasks.start(0, at)
    watch.until(lambda: it._facts.given_up)
    second = tasks.start(1, at)
    assert [first.result(watch.DEADLINE), second.result(watch.DEADLINE)] == told_to(0, 1)
    assert tasks.gathered == 2


def test_tasks_that_are_placed_badly_end_and_others_may_come(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FACTS_TIMEOUT", 0.1)
    it, at = serving(2)
    placed: list[list[int]] = []

    def place(facts: Sequence[TaskFacts]) -> Any:
        placed.append([told.attempt for told in facts])
        return (of_tasks.among(facts), None) if len(placed) == 2 else None

    it.place_by(place)
    tasks = Tasks(2)
    for told in [tasks.start(partition, at, attempt=1) for partition in range(2)]:
        with pytest.raises(requests.StoppedError, match="the driver has refused Spark's placement of the ranks"):
            told.result(watch.DEADLINE)
    watch.until(lambda: not it._facts.here)
    assert not it.begun and it.start_again() and not it.start_again()
    again = [tasks.start(partition, at, attempt=2) for partition in range(2)]
    assert [told.result(watch.DEADLINE) for told in again] == told_to(0, 1, attempt=2)
    assert it.begun and tasks.gathered == 0
    assert placed == [[100, 101], [200, 201]]


def test_a_broken_connection_is_made_again(serving: Any) -> None:
    it, at = serving(2)
    tasks = Tasks(2)
    with Proxy("127.0.0.1", at.port) as proxy:
        first = tasks.start(0, Endpoint(at.host, proxy.port, at.certificate, at.token))
        watch.until(lambda: len(it._facts.here) == 1)
        proxy.reset()
        watch.until(lambda: proxy.connections == 2 and len(it._facts.here) == 1)
        second = tasks.start(1, at)
        assert [first.result(watch.DEADLINE), second.result(watch.DEADLINE)] == told_to(0, 1)
    assert tasks.gathered == 0


@pytest.mark.parametrize("whole", [False, True])
def test_each_gets_the_share_of_its_node_and_all_nodes_where_its_path_needs_them(serving: Any, whole: bool) -> None:
    it, at = serving(3)
    placement = Placement(
        (Node(0, "host-0:1", "host-0", "10.0.0.1", 1, 0, 0, 2), Node(1, "host-1:1", "b", "2", 1, 2, 2, 1))
    )
    shares = placement.shares(whole=False)

    def place(facts: Sequence[TaskFacts]) -> Any:
        placed = of_tasks.among(facts)
        return [replace(each, share=shares[at // 2], all_nodes=whole) for at, each in enumerate(placed)], placement

    it.place_by(place)
    where = (at.host, at.port, at.certificate, at.token)
    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(lambda number: requests.exchange(fact(number), where, list, 30.0)[0], range(3)))
    assert [answer[0].share for answer in told] == [shares[0], shares[0], shares[1]]
    assert [answer[1:] for answer in told] == [[AllNodes(placement.nodes)] if whole else []] * 3
    assert it._guard.placement == placement


def test_an_answer_that_was_missed_is_given_again(serving: Any) -> None:
    _, at = serving(2)
    tasks = Tasks(2)
    told = [tasks.start(partition, at) for partition in range(2)]
    assert [it.result(watch.DEADLINE) for it in told] == told_to(0, 1)
    assert tasks.start(0, at).result(watch.DEADLINE) == told_to(0)[0]


def test_tasks_that_spark_starts_again_learn_of_each_other(serving: Any) -> None:
    _, at = serving(2)
    tasks = Tasks(2)
    for attempt in range(2):
        told = [tasks.start(partition, at, attempt) for partition in range(2)]
        assert [it.result(watch.DEADLINE) for it in told] == told_to(0, 1, attempt=attempt)


def test_the_facts_of_a_task_that_has_ended_do_not_count(serving: Any) -> None:
    """Its executor was killed: Spark starts all tasks again, and those of before must not be mixed with them."""
    it, at = serving(2)
    line = connections.connect((at.host, at.port, at.certificate, at.token), 5.0)
    line.sendall(connections.pack(fact(0)))
    watch.until(lambda: len(it._facts.here) == 1)
    line.close()
    watch.until(lambda: not it._facts.here)
    tasks = Tasks(2)
    told = [tasks.start(partition, at, 1) for partition in (1, 0)]
    assert [each.result(watch.DEADLINE) for each in told] == told_to(1, 0, attempt=1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(("a", 1, 11), [("a", 0, 13), ("a", 1, 12)], id="of-a-wave"),
        pytest.param(("a", 1, 11), [("b", 0, 12), ("b", 1, 13)], id="of-two-waves"),
    ],
)
def test_attempts_are_not_mixed(old: tuple[str, int, int], new: list[tuple[str, int, int]]) -> None:
    """Those of before may still be there when all tasks have been started again."""
    facts, writers = Facts(2, held_by), [cast(Any, object()) for _ in range(3)]
    facts.take(writers[0], told(*old, "old"))
    assert facts.told == 1
    facts.take(writers[1], told(*new[0], "new 0"))
    assert not facts.settled
    facts.take(writers[2], told(*new[1], "new 1"))
    assert facts.told == 2
    assert [facts.answer(writer) for writer in writers[1:]] == [[b"new 0", b"new 1"]] * 2
    for writer in writers:
        facts.forget(writer)
    assert not facts._waves and not facts._unanswered


def held_by(facts: Sequence[TaskFacts]) -> list[list[bytes]]:
    """Tell each task the sockets of all."""
    return [[told.held.encode() for told in facts]] * len(facts)


def told(stage_attempt: str, partition: int, attempt: int, held: str) -> TaskFacts:
    return TaskFacts(stage_attempt, attempt, held, fact(partition).facts)


def test_tasks_of_a_wave_before_are_not_answered() -> None:
    facts, writers = Facts(1, held_by), [cast(Any, object()) for _ in range(2)]
    facts.take(writers[0], told("b", 0, 5, "new"))
    facts.take(writers[1], told("a", 0, 4, "old"))
    assert facts.waiting() == [writers[0]]
    assert facts.waiting() == []
    assert facts.answer(writers[0]) == [b"new"]


def test_a_stage_that_is_started_again_in_part_ends(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have begun with facts of before, and cannot be told to ask Spark."""
    monkeypatch.setattr(server, "_FACTS_TIMEOUT", 0.2)
    _, at = serving(2)
    tasks = Tasks(2)
    for it in [tasks.start(partition, at) for partition in range(2)]:
        it.result(watch.DEADLINE)
    with pytest.raises(requests.StoppedError, match="Spark has started the tasks again"):
        tasks.start(0, at, 1).result(watch.DEADLINE)


@pytest.mark.spark
@pytest.mark.parametrize("spark_master", [pytest.param(MASTERS[0], marks=pytest.mark.long), MASTERS[1]], indirect=True)
def test_sparks_tasks_exchange_their_facts_over_the_channel(spark: Any) -> None:
    """How Spark numbers them is as it is thought to be. Tasks that are late, as on a busy machine, use Spark's way."""
    settled = []
    for _ in range(3):
        run = TorchDistributor(4, False, False).submit(trainings.all_reduce)
        assert run.results() == [10.0] * 4
        assert run._supervisor.server is not None
        facts = run._supervisor.server._facts
        assert facts.settled or facts.given_up
        settled.append(facts.settled)
    assert any(settled)


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
    told = messages.encode(fact(0))
    long = messages.encode(replace(fact(0), facts=replace(fact(0).facts, host="h" * 1000)))
    for wrong in ({"facts": []}, {"facts": None}, {"held": 1}, {"attempt": True}, {"more": 1}, {"kind": "Hi"}, long):
        with connections.connect((at.host, at.port, at.certificate, at.token), 5.0) as line:
            body = json.dumps({**told, **wrong}).encode()
            line.sendall(struct.pack("!IB", len(body), 1) + body)
            assert line.recv(1) == b""
    assert Tasks(1).start(0, at).result(watch.DEADLINE) == told_to(0)[0]
