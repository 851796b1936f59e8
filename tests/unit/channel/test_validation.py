"""Who may say what to the driver: each refusal, and what passes."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from distributor.channel import proof
from distributor.channel.frames import MAX_BODY, ProtocolError
from distributor.channel.validation import Validation
from distributor.text import notices
from distributor.values import messages
from distributor.values.files import Entry
from distributor.values.messages import Hello, Message
from distributor.values.outcome import Failure, Log, NodeReport, Outcome
from distributor.values.placement import Node, NodeFacts, Placement, digest

A = Node(0, "a", "host-a", "10.0.0.1", 1, 0, 0, 3)
B = Node(1, "b", "host-b", "10.0.0.2", 1, 3, 3, 1)
PLACED = Placement((A, B))
RETURNED = Outcome(3, "host-b", "finished", called=1.0, returned=2.0)
UNPROVED = "but does not prove with a secret that it is a node of this run"
TOO_MANY = "the sender claims to be a further node, but more node names have been reported than this run can have"
MISPLACED = "the sender's list of nodes has a wrong node rank, first rank or number of ranks in entry"
REPORT = NodeReport(1, "host-b", (RETURNED,), times={"task": 1.0}, passed=True)
FAILURE = Failure(3, 0, "host-b", "exit", "exited with code 3", time=5.0)


def not_run(rank: int) -> str:
    """Why a message of node b about a rank of another node, or of none, is refused."""
    return f"node 'b' sends a message about rank {rank}, but does not run this rank"


def not_later(kind: str) -> str:
    """Why a message that a node sends after its first message is refused, if only its type is wrong."""
    return f"a {kind} message is not allowed after the node's first message"


def guard(placement: Placement | None = PLACED, **options: Any) -> Validation:
    """The guard of a run of four ranks on two nodes."""
    made = Validation("3f2a", 4, 4, lambda rank, stream: 10, **options)
    if placement is not None:
        made.place(placement, digest(placement.text()))
    return made


def task(
    partition: int, *, attempt: int = 0, stage_attempt: str = "", held: str = "", **facts: Any
) -> messages.TaskFacts:
    known = {"executor": "a", "host": "host-a", "address": "10.0.0.1", "port": 1, **facts}
    return messages.TaskFacts(stage_attempt, attempt, held, NodeFacts(partition, **known))


def hello_of(*nodes: Node, name: str = "a") -> Hello:
    """The hello of a node that has placed the ranks itself."""
    text = Placement(nodes).text()
    return Hello(name, digest(text), text)


@pytest.mark.parametrize(
    "message",
    [
        Log(3, 1, 0, b"again"),
        Log(3, 3, 10, b"next"),
        messages.Beat(1, 0.5),
        messages.Beat(0),
        messages.Skipped(3, 2, 5, 1000),
        messages.StackDump(0, 3, "text"),
        messages.Failed(attempt=0),
        messages.Failed(FAILURE, attempt=0),
        messages.Stopped(4000, (Outcome(3, "host-b", "failed", FAILURE),), attempt=0),
        messages.Finished(REPORT, ((3, "QUI="),), (3,)),
        messages.Keeping(True),
        messages.Reached(1, True, -1, attempt=0),
        messages.RankPreempted(3, attempt=0),
        messages.RankPreempted(attempt=0),
        messages.Halted(3, 0, attempt=0),
        messages.UnfitNode("host-b", "No such file or directory in /tmp"),
        messages.Importing("b", 2, "torch"),
        messages.Warnings("host-b", ("is slow",)),
        messages.SystemMetrics(5.0, {"cpu_utilization_percentage": 12.5}),
        messages.Started(attempt=0),
        messages.Dead(),
        messages.Orphaned(lives=True),
        messages.Bye(),
    ],
)
def test_messages_of_a_node_about_itself_pass(message: Message | Log) -> None:
    assert guard().passes("b", message)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Log(2, 1, 0, b""), not_run(2)),
        (messages.RankPreempted(2, attempt=0), not_run(2)),
        (messages.Halted(2, 5, attempt=0), not_run(2)),
        (messages.Skipped(0, 1, 5, 1000), not_run(0)),
        (messages.StackDump(0, 4, ""), not_run(4)),
        (messages.Failed(replace(FAILURE, rank=0), attempt=0), not_run(0)),
        (messages.Stopped(1, (Outcome(0, "host-b", "failed"),), attempt=0), not_run(0)),
        (messages.Stopped(1, (Outcome(3, "", "failed", replace(FAILURE, rank=1)),), attempt=0), not_run(1)),
        (messages.Finished(replace(REPORT, outcomes=(replace(RETURNED, rank=0),))), not_run(0)),
        (messages.Finished(REPORT, ((2, "QUI="),)), not_run(2)),
        (messages.Finished(REPORT, (), (2,)), not_run(2)),
        (Log(3, 0, 0, b""), "the node sends output of stream 0, which is not the number of"),
        (Log(3, 5, 0, b""), "the node sends output of stream 5, which is not the number of"),
        (Log(3, 1, 11, b"x"), "output of rank 3 from byte 11 on, but the driver has only the bytes before 10"),
        (messages.Importing("a", 2, "torch"), "which module node 'a' is importing, but may report this only about"),
        (messages.Stop("because"), not_later("Stop")),
        (messages.Hello("b"), not_later("Hello")),
        (messages.Retire(), not_later("Retire")),
    ],
)
def test_a_message_about_another_node_or_out_of_turn_is_refused(message: Message | Log, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        guard().passes("b", message)


def test_a_node_has_so_many_warnings_and_tells_them_again() -> None:
    it = guard()
    first = messages.Warnings("host-b", tuple(map(str, range(64))))
    assert it.passes("b", first)
    assert it.passes("b", first)
    assert not it.passes("b", messages.Warnings("host-b", ("one more",)))
    assert it.passes("a", messages.Warnings("host-a", ("one more",)))
    assert not it.passes("a", messages.Warnings("host-a", ("x" * 20_000,)))


def test_a_node_is_the_process_that_showed_its_secret_first() -> None:
    it = guard()
    it.admit(Hello("a", secret="s"))
    it.admit(Hello("a", secret="s"))
    other = (
        "the sender claims to be node 'a', but another process has already registered as this node with another secret"
    )
    with pytest.raises(ProtocolError, match=other):
        it.admit(Hello("a", secret="t"))
    with pytest.raises(ProtocolError, match=other):
        it.admit(Hello("a", secret="ß\ud800"))
    it.forget("a")
    it.admit(Hello("a", secret="t"))


def test_on_spark_only_tasks_make_secrets() -> None:
    """Who has the token and was there first is not a node either."""
    it = guard()
    it.seal = b"seal"
    for secret in ("", "s", "ß\ud800", proof.make(b"another", "a"), proof.make(b"seal", "b")):
        why = "the sender claims to be node 'a', but has no valid secret of this node"
        with pytest.raises(ProtocolError, match=why):
            it.admit(Hello("a", secret=secret))
    it.admit(Hello("a", secret=proof.make(b"seal", "a")))


def test_secrets_are_not_shown() -> None:
    shown = repr([Hello("a", secret="horse"), messages.Value(0, 1, "a", "horse")])
    assert "horse" not in shown


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (Hello("c"), "the sender claims to be node 'c', but the run has no node of this name"),
        (
            hello_of(replace(A, executor="c", local_world_size=4), name="c"),
            "the sender claims to be node 'c', but the run has no node of this name",
        ),
    ],
)
def test_a_hello_of_an_unknown_node_is_refused(hello: Hello, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        guard().admit(hello)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((A,), "the sender's list of nodes has 3 ranks in total, but the run has 4"),
        ((A, replace(B, local_world_size=2)), "the sender's list of nodes has 5 ranks in total, but the run has 4"),
        ((A, replace(B, executor="a")), "the sender's list of nodes contains a node twice"),
        ((B, A), f"{MISPLACED} 0"),
        ((replace(A, local_world_size=-1), B), f"{MISPLACED} 0"),
        ((replace(A, local_world_size=2**62), B), f"{MISPLACED} 0"),
        ((A, replace(B, first_rank=2)), f"{MISPLACED} 1"),
        ((replace(A, executor="c"), B), "the sender claims to be node 'a', but the run has no node of this name"),
    ],
)
def test_a_placement_that_is_not_that_of_the_run_is_refused(nodes: tuple[Node, ...], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        guard(None).admit(hello_of(*nodes))


def test_the_first_placement_passes_and_is_that_of_the_run() -> None:
    it = guard(None)
    it.admit(hello_of(A, B))
    assert it.placement == PLACED
    it.admit(hello_of(A, B, name="b"))


@pytest.mark.parametrize("text", ["", "x", "{}", '[{"node_rank": 0}]', '["a"]', "[" * 100])
def test_a_text_that_is_no_placement_is_refused(text: str) -> None:
    it = guard(None)
    with pytest.raises(ProtocolError, match="the sender's list of nodes") if text else nullcontext():
        it.admit(Hello("a", digest(text), text))
    assert it.placement is None


@pytest.mark.parametrize("placed_by", ["driver", "node"])
def test_a_node_with_another_placement_is_refused(placed_by: str) -> None:
    """It is of tasks that Spark has started before or again, or got other facts."""
    it = guard(PLACED if placed_by == "driver" else None)
    if placed_by == "node":
        it.admit(hello_of(A, B))
    other = Placement((A, replace(B, port=2)))
    ours, theirs = digest(PLACED.text())[:16], digest(other.text())[:16]
    why = (
        f"node 'b' has another placement of the ranks (sha256 '{theirs}') than the run ('{ours}'): it belongs to tasks "
        "that Spark has started at another time, or its facts differ"
    )
    with pytest.raises(ProtocolError, match=f"^{re.escape(why)}$"):
        it.admit(hello_of(*other.nodes, name="b"))
    it.admit(Hello("b", digest(PLACED.text())))


def test_a_digest_of_other_nodes_is_refused() -> None:
    it = guard(None)
    with pytest.raises(ProtocolError, match="has another placement"):
        it.admit(replace(hello_of(A, B), digest="0"))
    assert it.placement is None


def test_names_without_a_placement_are_bounded() -> None:
    it = guard(None)
    with pytest.raises(ProtocolError, match=TOO_MANY):
        for number in range(1000):
            it.admit(Hello(str(number)))
    assert number == 16


def test_values_come_from_the_task_of_their_node() -> None:
    it = guard()
    it.admit(Hello("b", secret="s"))
    it.check_value(messages.Value(3, 10, "b", "s"))
    why = (
        f"the sender announces the return value of rank 3, {UNPROVED}|"
        "node 'b' sends a message about rank [23], but does not run this rank"
    )
    for value in (messages.Value(3, 10), messages.Value(3, 10, "b"), messages.Value(2, 10, "b", "s")):
        with pytest.raises(ProtocolError, match=why):
            it.check_value(value)


def test_facts_of_no_task_are_refused() -> None:
    guard().check_facts(task(3))
    with pytest.raises(ProtocolError, match="a task reports that it runs partition 4, which the run does not have"):
        guard().check_facts(task(4))


def test_imports_of_no_node_are_refused() -> None:
    it = guard()
    it.check_importing(messages.Importing("a", 2, "torch"))
    why = "node 'c' reports which module it is importing, but the run has no node of this name"
    with pytest.raises(ProtocolError, match=why):
        it.check_importing(messages.Importing("c", 2, "torch"))
    before = guard(None)
    with pytest.raises(ProtocolError, match=TOO_MANY):
        for number in range(1000):
            before.check_importing(messages.Importing(str(number), 2, "torch"))


def test_the_log_has_so_many_lines(caplog: pytest.LogCaptureFixture) -> None:
    it = guard()
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            it.log("10.0.0.7", "sent an invalid message (the sender claims to be node 'c')")
        notices.flush()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == (
        "run 3f2a: the driver ended a connection from 10.0.0.7, which sent an invalid message (the sender claims to be "
        "node 'c')"
    )
    assert lines[-1] == f"{lines[0]}; further ended connections are not logged"
    assert len(lines) == 10


def test_the_first_message_is_bounded_by_the_number_of_tasks() -> None:
    assert Validation().first_limit < guard().first_limit < Validation(tasks=10**6).first_limit == MAX_BODY


FILE = Entry("ckpt/a.pt", 3, 0o644, 5, "00")


def node_rank(message: messages.Upload | messages.Delete, placement: Placement | None = PLACED) -> int:
    validation = guard(placement)
    validation.admit(Hello("b", secret="secret"))
    return validation.check_node(message)


def test_a_node_brings_files_with_its_secret() -> None:
    assert node_rank(messages.Upload(FILE, node="b", secret="secret")) == 1
    assert node_rank(messages.Delete("ckpt/a.pt", "b", "secret")) == 1


@pytest.mark.parametrize(
    ("message", "placement"),
    [
        (messages.Upload(FILE, node="b", secret="guess"), PLACED),
        (messages.Upload(FILE, node="c", secret="secret"), PLACED),
        (messages.Delete("a", "a", ""), PLACED),
        (messages.Upload(FILE, node="b", secret="secret"), None),
    ],
)
def test_files_without_a_secret_or_before_the_placement_are_refused(
    message: messages.Upload | messages.Delete, placement: Placement | None
) -> None:
    with pytest.raises(ProtocolError, match=UNPROVED):
        node_rank(message, placement)
