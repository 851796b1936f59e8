"""Who may say what to the driver: each refusal, and what passes."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import pytest

from distributor.channel import proof
from distributor.channel.frames import MAX_BODY, ProtocolError
from distributor.channel.guard import Guard
from distributor.values import messages
from distributor.values.files import Entry
from distributor.values.messages import Hello, Message
from distributor.values.outcome import Failure, Log, NodeReport, Outcome
from distributor.values.placement import Node, Placement

A = Node(0, "a", "host-a", "10.0.0.1", 1, 0, 0, 3)
B = Node(1, "b", "host-b", "10.0.0.2", 1, 3, 3, 1)
PLACED = Placement((A, B))
RETURNED = Outcome(3, "host-b", "finished", called=1.0, returned=2.0)
REPORT = NodeReport(1, "host-b", (RETURNED,), times={"task": 1.0}, passed=True)
FAILURE = Failure(3, 0, "host-b", "exit", "exited with code 3", time=5.0)


def guard(placement: Placement | None = PLACED, **options: Any) -> Guard:
    """The guard of a run of four ranks on two nodes."""
    return Guard("3f2a", 4, 4, lambda: placement, lambda rank, stream: 10, **options)


@pytest.mark.parametrize(
    "message",
    [
        Log(3, 1, 0, b"again"),
        Log(3, 3, 10, b"next"),
        messages.Beat(1, 0.5),
        messages.Beat(0),
        messages.Skipped(3, 2, 5, 1000),
        messages.Stacks(0, 3, "text"),
        messages.Failed(),
        messages.Failed(FAILURE),
        messages.Stopped(4000, (Outcome(3, "host-b", "failed", FAILURE),)),
        messages.Finished(REPORT, ((3, "QUI="),), (3,)),
        messages.Keeping(True),
        messages.Reached(1, True, -1),
        messages.Preempted(3),
        messages.Halted(3, 0),
        messages.Unfit("host-b", "No such file or directory in /tmp"),
        messages.Importing("b", 2, "torch"),
        messages.Warnings("host-b", ("is slow",)),
        messages.Started(),
        messages.Dead(),
        messages.Orphaned(succeeded=True),
        messages.Bye(),
    ],
)
def test_what_a_node_says_of_itself_passes(message: Message | Log) -> None:
    assert guard().passes("b", message)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Log(2, 1, 0, b""), "rank 2 is not on node 'b'"),
        (messages.Reached(-1, True, 5), "the number of a proposal is -1"),
        (messages.Reached(1, False, 2**80), f"a step is {2**80}"),
        (messages.Preempted(2), "rank 2 is not on node 'b'"),
        (messages.Halted(2, 5), "rank 2 is not on node 'b'"),
        (messages.Halted(3, -1), "a step is -1"),
        (messages.Finished(replace(REPORT, host="host-a")), "node 'b' is not node 1 on host 'host-a'"),
        (messages.Finished(replace(REPORT, node_rank=0)), "node 'b' is not node 0 on host 'host-b'"),
        (messages.Finished(replace(REPORT, outcomes=())), "node 'b' does not report the outcomes of its ranks"),
        (
            messages.Finished(replace(REPORT, outcomes=(Outcome(3, "host-b", "failed", FAILURE),))),
            "node 'b' has not succeeded",
        ),
        (messages.Finished(replace(REPORT, error=("StartError", "no"))), "node 'b' has not succeeded"),
        (messages.Finished(replace(REPORT, passed=False)), "node 'b' has not succeeded"),
        (messages.Finished(replace(REPORT, times={"task": math.inf})), "a time in the node's report is not finite"),
        (messages.Finished(REPORT, ((2, "QUI="),)), "rank 2 is not on node 'b'"),
        (messages.Finished(REPORT, ((3, "QU"),)), "the value of rank 3 is not base64: Incorrect padding"),
        (messages.Finished(REPORT, (), (2,)), "rank 2 is not on node 'b'"),
        (messages.Unfit("h" * 1000, ""), "the name of a host has 1000 characters, more than 512"),
        (messages.Unfit("h", "x" * 20_000), "a reason has 20000 characters, more than 16384"),
        (Log(3, 0, 0, b""), "there is no stream 0"),
        (Log(3, 5, 0, b""), "there is no stream 5"),
        (Log(3, 1, 11, b"x"), "bytes 10-11 of the output of rank 3 are left out"),
        (Log(3, 1, 2**63 - 1, b"x"), "no output has 9223372036854775807 bytes"),
        (messages.Beat(2), "node 'b' cannot have 2 living ranks"),
        (messages.Beat(-1), "node 'b' cannot have -1 living ranks"),
        (messages.Beat(1, math.nan), "no rank is idle for nan s"),
        (messages.Beat(1, -1.0), "no rank is idle for -1.0 s"),
        (messages.Skipped(0, 1, 5, 1000), "rank 0 is not on node 'b'"),
        (messages.Skipped(3, 4, 5, 1000), "stream 4 is not output"),
        (messages.Skipped(3, 1, -5, 1000), "a number of lines is -5"),
        (messages.Skipped(3, 1, 5, 2**64), "a position is 18446744073709551616"),
        (messages.Stacks(0, 4, ""), "rank 4 is not on node 'b'"),
        (messages.Stacks(-1, 3, ""), "the number of a request is -1"),
        (messages.Stacks(0, 3, "x" * (1 << 20)), "stacks has 1048576 characters, more than 524288"),
        (messages.Failed(replace(FAILURE, rank=0)), "rank 0 is not on node 'b'"),
        (messages.Failed(replace(FAILURE, time=math.inf)), "time is inf, which is not a finite number"),
        (
            messages.Stopped(1, (Outcome(3, "", "failed", called=-math.inf),)),
            "called is -inf, which is not a finite number",
        ),
        (messages.Stopped(0, ()), "there is no port 0"),
        (messages.Stopped(1, (Outcome(0, "host-b", "failed"),)), "rank 0 is not on node 'b'"),
        (messages.Stopped(1, (Outcome(3, "", "failed", replace(FAILURE, rank=1)),)), "rank 1 is not on node 'b'"),
        (messages.Importing("a", 2, "torch"), "the sender is not node 'a'"),
        (messages.Importing("b", 2, "m" * 1000), "the name of a module has 1000 characters, more than 512"),
        (messages.Warnings("host-a", ()), "node 'b' is not on host 'host-a'"),
        (messages.Stop("because"), "a node does not send Stop"),
        (messages.Hello("b"), "a node does not send Hello"),
        (messages.Retire(), "a node does not send Retire"),
    ],
)
def test_what_a_node_cannot_say_is_refused(message: Message | Log, why: str) -> None:
    with pytest.raises(ProtocolError, match=f"^{why}$"):
        guard().passes("b", message)


def test_output_is_left_out_only_where_the_driver_does_not_keep_it() -> None:
    with pytest.raises(ProtocolError, match="output of rank 3 is left out, but the driver keeps all of it"):
        guard(skips=False).passes("b", messages.Skipped(3, 1, 5, 1000))


def test_a_node_has_so_many_warnings_and_tells_them_again() -> None:
    it = guard()
    first = messages.Warnings("host-b", tuple(map(str, range(64))))
    assert it.passes("b", first)
    assert it.passes("b", first)
    assert not it.passes("b", messages.Warnings("host-b", ("one more",)))
    assert it.passes("a", messages.Warnings("host-a", ("one more",)))
    assert not it.passes("a", messages.Warnings("host-a", ("x" * 20_000,)))


def test_a_node_is_who_has_shown_its_secret_first() -> None:
    it = guard()
    it.admit(Hello("a", secret="s"))
    it.admit(Hello("a", secret="s"))
    with pytest.raises(ProtocolError, match="another process has already registered as node 'a'"):
        it.admit(Hello("a", secret="t"))
    with pytest.raises(ProtocolError, match="another process has already registered as node 'a'"):
        it.admit(Hello("a", secret="ß\ud800"))
    it.forget("a")
    it.admit(Hello("a", secret="t"))


def test_on_spark_only_tasks_make_secrets() -> None:
    """Who has the token and was there first is not a node either."""
    it = guard()
    it.seal = b"seal"
    for secret in ("", "s", "ß\ud800", proof.make(b"another", "a"), proof.make(b"seal", "b")):
        with pytest.raises(ProtocolError, match="the sender has no valid secret for node 'a'"):
            it.admit(Hello("a", secret=secret))
    it.admit(Hello("a", secret=proof.make(b"seal", "a")))


def test_secrets_are_not_shown() -> None:
    shown = repr([Hello("a", secret="horse"), messages.Value(0, 1, "a", "horse")])
    assert "horse" not in shown


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (Hello("c"), "there is no node 'c'"),
        (Hello("c", (replace(A, executor="c", local_world_size=4),)), "there is no node 'c'"),
        (Hello("a" * 1000), "the name of a node has 1000 characters, more than 512"),
        (Hello("a", secret="s" * 1000), "the secret of a node has 1000 characters, more than 512"),
    ],
)
def test_who_is_no_node_is_refused(hello: Hello, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        guard().admit(hello)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((A,), "the placement has 3 ranks, but the run has 4"),
        ((A, replace(B, local_world_size=2)), "the placement has 5 ranks, but the run has 4"),
        ((A, replace(B, executor="a")), "a node occurs twice in the placement"),
        ((B, A), "node 0 of the placement is out of order"),
        ((replace(A, local_world_size=-1), B), "node 0 of the placement is out of order"),
        ((replace(A, local_world_size=2**62), B), "node 0 of the placement is out of order"),
        ((A, replace(B, first_rank=2)), "node 1 of the placement is out of order"),
        ((replace(A, host="h" * 1000), B), "a name in the placement has 1000 characters"),
        ((replace(A, executor="c"), B), "there is no node 'a'"),
    ],
)
def test_a_placement_that_is_not_that_of_the_run_is_refused(nodes: tuple[Node, ...], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        guard(None).admit(Hello("a", nodes))


def test_the_first_placement_passes() -> None:
    guard(None).admit(Hello("a", PLACED.nodes))


def test_names_without_a_placement_are_bounded() -> None:
    it = guard(None)
    with pytest.raises(ProtocolError, match="there are more nodes than the run can have"):
        for number in range(1000):
            it.admit(Hello(str(number)))
    assert number == 16


def test_values_come_from_the_task_of_their_node() -> None:
    it = guard()
    it.admit(Hello("b", secret="s"))
    it.check_value(messages.Value(3, 10, "b", "s"))
    for value in (messages.Value(3, 10), messages.Value(3, 10, "b"), messages.Value(2, 10, "b", "s")):
        with pytest.raises(ProtocolError, match="rank 3 comes without the secret|rank [23] is not on node"):
            it.check_value(value)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (messages.TaskFacts("", 0, 4, {}), "there is no task 4"),
        (messages.TaskFacts("", 0, -1, {}), "there is no task -1"),
        (messages.TaskFacts("", 2**63, 0, {}), "the number of a task attempt is 9223372036854775808"),
        (messages.TaskFacts("w" * 1000, 0, 0, {}), "the name of a wave has 1000 characters"),
    ],
)
def test_facts_of_no_task_are_refused(told: messages.TaskFacts, why: str) -> None:
    guard().check_facts(messages.TaskFacts("", 0, 3, {}))
    with pytest.raises(ProtocolError, match=why):
        guard().check_facts(told)


def test_imports_of_no_node_are_refused() -> None:
    it = guard()
    it.check_importing(messages.Importing("a", 2, "torch"))
    with pytest.raises(ProtocolError, match="there is no node 'c'"):
        it.check_importing(messages.Importing("c", 2, "torch"))
    with pytest.raises(ProtocolError, match="the run has 4 tasks, and cannot have 5 nodes"):
        it.check_importing(messages.Importing("a", 5, "torch"))
    before = guard(None)
    with pytest.raises(ProtocolError, match="there are more nodes than the run can have"):
        for number in range(1000):
            before.check_importing(messages.Importing(str(number), 2, "torch"))


def test_the_log_has_so_many_lines(caplog: pytest.LogCaptureFixture) -> None:
    it = guard()
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            it.log("10.0.0.7", "sent an invalid message (there is no node 'c')")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == (
        "run 3f2a: ended a connection from 10.0.0.7, which sent an invalid message (there is no node 'c')"
    )
    assert lines[-1] == f"{lines[0]}; further ones are not logged"
    assert len(lines) == 10


def test_the_first_message_is_bounded_by_the_number_of_tasks() -> None:
    assert Guard().first_limit < guard().first_limit < Guard(tasks=10**6).first_limit == MAX_BODY


FILE = Entry("ckpt/a.pt", 3, 0o644, 5, "00")


def deposited(told: messages.Deposit | messages.Withdraw, placement: Placement | None = PLACED) -> int:
    judge = guard(placement)
    judge.admit(Hello("b", (A, B), "secret"))
    return judge.check_deposit(told)


def test_a_node_brings_files_with_its_secret() -> None:
    assert deposited(messages.Deposit(FILE, node="b", secret="secret")) == 1
    assert deposited(messages.Withdraw("ckpt/a.pt", "b", "secret")) == 1


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (messages.Deposit(FILE, node="b", secret="guess"), "without the secret of its node"),
        (messages.Deposit(FILE, node="c", secret="secret"), "without the secret of its node"),
        (messages.Withdraw("a", "a", ""), "without the secret of its node"),
        (messages.Withdraw("../a", "b", "secret"), "a file of a rank cannot have the path '../a'"),
        *(
            (messages.Deposit(replace(FILE, **wrong), node="b", secret="secret"), why)
            for wrong, why in (
                ({"path": "/etc/passwd"}, "have the path '/etc/passwd'"),
                ({"path": "a/../../b"}, "have the path"),
                ({"path": ""}, "have the path"),
                ({"path": "a\0b"}, "have the path"),
                ({"path": "a" * 5000}, "has 5000 characters"),
                ({"size": -1}, "the size of a file is -1"),
                ({"mtime_ns": -1}, "the time of a file is -1"),
                ({"mode": 0o4755}, "have the mode 4755"),
            )
        ),
    ],
)
def test_files_that_are_not_taken(told: messages.Deposit | messages.Withdraw, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        deposited(told)


def test_nobody_brings_files_before_the_placement_is_known() -> None:
    with pytest.raises(ProtocolError, match="without the secret"):
        deposited(messages.Deposit(FILE, node="b", secret="secret"), None)
