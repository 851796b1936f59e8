"""Whoever has the run's token, as any rank does, costs bounded memory and cannot end the run."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import fuzz
import psutil
import pytest
import trainings
import watch
from listeners import GROWTH, Listener, answer, growth_under, refused, trusted

from distributor import Run, Status, TorchDistributor
from distributor.channel import frames, listener as door, server as channel
from distributor.channel.result_receiver import ResultReceiver
from distributor.channel.server import ChannelServer
from distributor.channel.transfers import Transfers
from distributor.channel.validation import Validation
from distributor.display.logs import Logs
from distributor.text.wording import size
from distributor.values import messages
from distributor.values.outcome import Failure, Log
from distributor.values.placement import Node, NodeFacts, Placement, digest
from distributor.values.plan import Endpoint

#: Four ranks on two nodes.
PLACED = Placement(
    (Node(0, "a", "host-a", "10.0.0.1", 1, 0, 0, 2), Node(1, "b", "host-b", "10.0.0.2", 1, 2, 2, 2))
).text()

Served = tuple[Listener, ChannelServer, Endpoint]


@pytest.fixture
def served() -> Iterator[Served]:
    """The driver of a run of four ranks on two nodes; node a is connected."""
    listener = Listener()

    guard = Validation("3f2a", 4, 4, lambda rank, stream: listener.has.get((rank, stream), 0))
    with ChannelServer(listener, tasks=4, guard=guard) as it:
        endpoint = it.listen("127.0.0.1", "127.0.0.1")
        with member(endpoint, "a"):
            yield listener, it, endpoint
            assert listener.lost == []


def task(partition: int, attempt: int = 0, stage_attempt: str = "") -> messages.TaskFacts:
    facts = NodeFacts(partition, f"host-{partition}:1", f"host-{partition}", "10.0.0.1", 4000)
    return messages.TaskFacts(stage_attempt, attempt, f"task {partition}", facts)


def hello(name: str) -> messages.Hello:
    return messages.Hello(name, digest(PLACED), PLACED, f"secret of {name}")


def member(endpoint: Endpoint, name: str) -> Any:
    """The connection of a node, which the driver has welcomed."""
    connection = trusted(endpoint)
    connection.sendall(frames.pack(hello(name)))
    assert isinstance(answer(connection), messages.Welcome)
    return connection


def say(endpoint: Endpoint, *said: messages.Message | Log) -> list[messages.Message]:
    """What the driver answers to the frames of one connection until it ends that."""
    heard = []
    with trusted(endpoint) as connection:
        with suppress(OSError):
            for each in said:
                connection.sendall(frames.pack_log(each) if isinstance(each, Log) else frames.pack(each))
        while (told := answer(connection)) is not None:
            heard.append(told)
    return heard


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([messages.Hello("a", digest(PLACED), PLACED)], id="takes-the-place-of-a-node"),
        pytest.param([messages.Hello("c"), messages.Failed(attempt=0)], id="is-no-node"),
        pytest.param([hello("b"), Log(0, 1, 0, b"x")], id="rank-of-another-node"),
        pytest.param(
            [hello("b"), messages.Failed(Failure(0, 0, "", "exit", ""), attempt=0)], id="failure-of-another-node"
        ),
        pytest.param([hello("b"), messages.Stop("because")], id="order"),
        pytest.param([messages.Beat(1)], id="no-hello"),
        pytest.param([messages.Value(0, 10)], id="value-without-the-secret"),
        pytest.param([messages.Importing("c", 1, "torch")], id="importing-of-no-node"),
        pytest.param([task(4)], id="no-task"),
    ],
)
def test_an_invalid_message_ends_its_connection_with_a_line_in_the_log(
    served: Served, said: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    listener, it, endpoint = served
    it.receiver.expect(range(4))
    known = len(listener.events)
    assert all(isinstance(each, (messages.Welcome, messages.BeatHeard)) for each in say(endpoint, *said))
    told = "run 3f2a: the driver ended a connection from 127.0.0.1, which sent an invalid message ("
    watch.until(lambda: told in caplog.text)
    assert listener.logs == []
    assert {type(message) for _, message in listener.events[known:]} <= {messages.Hello, messages.AllNodes}


def test_a_node_may_reconnect_after_an_invalid_message(served: Served) -> None:
    listener, _, endpoint = served
    say(endpoint, hello("b"), messages.Stop("because"))
    with member(endpoint, "b") as again:
        again.sendall(frames.pack_log(Log(2, 1, 0, b"here again")))
        watch.until(lambda: listener.logs)
        again.sendall(frames.pack(messages.Bye()))
        assert isinstance(answer(again), messages.Farewell)


def test_a_connection_without_a_first_message_ends_in_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_FIRST_TIMEOUT", 0.5, raising=False)
    with trusted(served[2]) as silent, trusted(served[2]) as half:
        half.sendall(struct.pack("!IB", 1000, 1))
        for connection in (silent, half):
            connection.settimeout(30)
            assert refused(connection)


def test_a_connection_without_a_first_message_counts_as_unauthenticated(served: Served) -> None:
    """Otherwise they would take all descriptors, and memory for each message that they have not finished."""
    listener, _, endpoint = served
    before = watch.open_descriptors()
    with ExitStack() as stack:
        for _ in range(3 * door._MAX_UNAUTHENTICATED):
            connection = stack.enter_context(trusted(endpoint))
            with suppress(OSError):
                connection.sendall(struct.pack("!IB", frames.MAX_BODY, 1) + bytes(1 << 16))
        ours = 3 * door._MAX_UNAUTHENTICATED
        watch.until(lambda: watch.open_descriptors() - before <= ours + door._MAX_UNAUTHENTICATED + 2)
        stack.enter_context(member(endpoint, "b")).sendall(frames.pack(messages.Bye()))
        watch.until(lambda: listener.heard(messages.Bye))


def test_a_node_that_does_not_read_is_dropped(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    _, it, endpoint = served
    before = psutil.Process().memory_info().rss
    with member(endpoint, "b") as deaf:
        long = messages.Stop("x" * 1000)
        for _ in range(20_000):
            it.order(long)
        watch.until(lambda: "127.0.0.1, which does not read what the driver sends" in caplog.text)
        assert psutil.Process().memory_info().rss - before < GROWTH
        # It comes back, and says good-bye.
        with member(endpoint, "b") as again:
            again.sendall(frames.pack(messages.Bye()))
            assert isinstance(answer(again), messages.Farewell)
        deaf.close()


def test_the_frames_of_one_node_do_not_hold_up_those_of_another() -> None:
    """Both have sent thousands of frames when the driver reads the first one."""
    listener, ready = Listener(), threading.Event()
    with ChannelServer(listener) as it, ExitStack() as stack:
        nodes = []
        for name in "ab":
            driver, node = socket.socketpair()
            nodes.append(stack.enter_context(node))
            it.attach(driver)
            node.sendall(frames.pack(messages.Hello(name)))
        watch.until(lambda: len(listener.events) == 2)
        it._loop.call_soon_threadsafe(ready.wait)
        for node in nodes:
            node.sendall(frames.pack(messages.Started(attempt=0)) * 4000)
        ready.set()
        watch.until(lambda: len(listener.heard(messages.Started)) == 8000)
    heard = "".join(name for name, _ in listener.heard(messages.Started))
    assert "b" in heard[:1000] and "a" in heard[:1000]


def test_a_task_that_comes_after_the_start_stops_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Spark has started it or somebody has the token: if Spark has, the nodes of before are lost anyway."""
    monkeypatch.setattr(channel, "_FACTS_TIMEOUT", 0.1)
    listener = Listener()
    with ChannelServer(listener, tasks=2) as it:
        endpoint = it.listen("127.0.0.1", "127.0.0.1")
        facts = [task(number, number, "wave") for number in range(2)]
        with trusted(endpoint) as first, trusted(endpoint) as second:
            first.sendall(frames.pack(facts[0]))
            second.sendall(frames.pack(facts[1]))
            assert isinstance(answer(first), messages.Placed)
        with member(endpoint, "a") as node:
            again = task(0, 10**6, "other")
            assert say(endpoint, again) == [messages.Stop("Spark has started the tasks again")]
            with trusted(endpoint) as missed:
                missed.sendall(frames.pack(facts[1]))
                assert isinstance(answer(missed), messages.Placed)
            node.sendall(frames.pack(messages.Beat(1)))
            assert isinstance(answer(node), messages.BeatHeard)  # and no order to stop before it
            assert it.stop_reason == ""


def test_bytes_after_a_tasks_facts_are_not_kept() -> None:
    with ChannelServer(Listener(), tasks=2) as it:
        endpoint = it.listen("127.0.0.1", "127.0.0.1")
        before = psutil.Process().memory_info().rss
        with trusted(endpoint) as connection:
            connection.sendall(frames.pack(task(0)))
            with suppress(OSError):
                for _ in range(2 * GROWTH >> 20):
                    connection.sendall(bytes(1 << 20))
            assert psutil.Process().memory_info().rss - before < GROWTH
            assert refused(connection)


def test_facts_of_impossible_tasks_are_refused() -> None:
    with ChannelServer(Listener(), tasks=1) as it, ExitStack() as stack:
        endpoint = it.listen("127.0.0.1", "127.0.0.1")
        for number in range(8):
            connection = stack.enter_context(trusted(endpoint))
            connection.sendall(frames.pack(task(0, number, str(number))))
            assert isinstance(answer(connection), messages.Placed)
        last = stack.enter_context(trusted(endpoint))
        last.sendall(frames.pack(task(0, 9, "9")))
        assert refused(last)


def test_only_the_task_of_its_node_brings_a_value(served: Served) -> None:
    _, it, endpoint = served
    it.returns = Transfers(ResultReceiver(limit=1 << 20))
    it.receiver.expect(range(4))
    for value in (
        messages.Value(0, 5),
        messages.Value(0, 5, "b", "secret of b"),
        messages.Value(2, 5, "a", "secret of a"),
    ):
        assert say(endpoint, value) == []
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(messages.Value(0, 5, "a", "secret of a")))
        assert answer(connection) == messages.Proceed()
        connection.sendall(b"value")
        assert answer(connection) == messages.Received()
    arrived = it.receiver.get(0)
    assert arrived is not None and bytes(arrived.data) == b"value"


def test_a_reason_that_fills_a_frame_stops_the_others(served: Served) -> None:
    _, it, endpoint = served
    it.stop("x" * frames.MAX_BODY)
    with member(endpoint, "b") as node:
        told = answer(node)
        assert isinstance(told, messages.Stop) and told.reason.startswith("xxx")
        node.sendall(frames.pack(messages.Bye()))
        assert isinstance(answer(node), messages.Farewell)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Log]:
    """The output that runs have taken."""
    taken: list[Log] = []
    take = Logs.take

    def remember(self: Logs, log: Log) -> None:
        taken.append(log)
        take(self, log)

    monkeypatch.setattr(Logs, "take", remember)
    return taken


def attack(endpoint: Endpoint, drawn: list[bytes], openings: list[bytes]) -> None:
    """Send frames over as many connections as they take; some ends of these are not read."""
    for number, frames_ in enumerate(fuzz.connections(drawn, openings)):
        with suppress(OSError), trusted(endpoint) as connection:
            connection.settimeout(5)
            connection.sendall(b"".join(frames_))
            if number % 4 == 0:
                refused(connection)


@pytest.mark.spark
@pytest.mark.timeout(20 * watch.DEADLINE)
@pytest.mark.parametrize(
    "count", [2_000, pytest.param(10_000, marks=pytest.mark.long), pytest.param(100_000, marks=pytest.mark.long)]
)
@pytest.mark.long
def test_a_run_goes_on_while_random_frames_come_with_the_token(
    count: int,
    one_jvm: Any,
    shown: list[Log],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = watch.endpoints(monkeypatch)

    def train(go: str) -> float:
        total = trainings.all_reduce()
        trainings.wait_for(go)
        print("after the attack")
        return total

    run = TorchDistributor(2, False, False).submit(train, str(tmp_path / "go"))
    watch.until(lambda: run.status is Status.RUNNING)
    assert run.placement is not None
    node = run.placement.nodes[0].executor
    names = ["", node, "c", run.placement.nodes[0].host]
    openings = [
        frames.pack(each)
        for each in (messages.Hello(node), messages.Hello("c", digest(PLACED), PLACED), messages.Hello(node))
    ]
    drawn = fuzz.frames_of(names, count)
    threads = threading.active_count()
    attackers = [
        threading.Thread(target=attack, args=(seen[-1], drawn[half::2], openings), daemon=True) for half in range(2)
    ]
    grown = growth_under(attackers, 10 * watch.DEADLINE)
    assert run.status is Status.RUNNING
    assert threading.active_count() <= threads + 1  # one that shows the first line
    (tmp_path / "go").touch()
    assert run.results(timeout=watch.DEADLINE) == [3.0, 3.0]
    assert sorted(log.rank for log in shown if log.data == b"after the attack\n") == [0, 1]
    assert grown < GROWTH
    print(f"{count:,} frames with the token: the driver grew by at most {size(grown)}")
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) <= 11, "\n".join(record.getMessage() for record in said)
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_no_valid_message_of_a_node_breaks_the_driver(run_of_nobody: Callable[[], Run]) -> None:
    """Whatever passes the guard is taken without an error, even if it is not what an agent would say."""
    run = run_of_nobody()
    guard = run._supervisor._guard()
    taken = 0
    for drawn in fuzz.draw(fuzz.any_message(["a", "b", "host-a", "host-b"]), 3000):
        for name in "ab":
            try:
                message = messages.decode(frames.parse(json.dumps(messages.encode(drawn)).encode()))
                passes = guard.passes(name, message)
            except (ValueError, frames.ProtocolError):
                continue
            if passes:
                run._supervisor.on_message(name, message)
                taken += 1
    assert taken > 100
    assert len(run._supervisor._alarm._due) < 10


def test_thousands_of_failures_arm_one_deadline(run_of_nobody: Callable[[], Run]) -> None:
    run = run_of_nobody()
    before = threading.active_count()
    for _ in range(5000):
        run._supervisor.on_message("a", messages.Failed(attempt=0))
    assert len(run._supervisor._alarm._due) < 10
    assert threading.active_count() <= before + 1


class Nobody:
    """A scheduler whose run has no nodes but those that the test plays."""

    on_driver = False

    def __init__(self) -> None:
        self.ended = threading.Event()

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=target)

    def run(self, job: Any, server: ChannelServer) -> Any:
        server.listen("127.0.0.1", "127.0.0.1", None)
        self.ended.wait(watch.DEADLINE)
        from distributor.values.outcome import Collected

        return Collected()

    def cancel(self) -> None:
        pass

    def waiting_for(self) -> None:
        return None


@pytest.fixture
def run_of_nobody() -> Iterator[Callable[[], Run]]:
    """Makes a run of four ranks on two nodes, which have started."""
    from jobs import make_job

    from distributor.run import handle

    scheduler = Nobody()

    def make() -> Run:
        job = make_job(num_processes=4)
        run = handle.Run(job, scheduler, view=None).start()  # type: ignore[arg-type]
        watch.until(lambda: run._supervisor.server is not None)
        for name in "ab":
            run._supervisor.on_message(name, hello(name))
            run._supervisor.on_message(name, messages.Started(attempt=0))
        return run

    yield make
    scheduler.ended.set()
