"""Dataclasses as plain values and back, and the bounds of messages."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from distributor.values import codec, messages
from distributor.values.codec import Name, Port
from distributor.values.files import Entry
from distributor.values.outcome import Failure, NodeReport, Outcome
from distributor.values.placement import NodeFacts


@dataclass(frozen=True)
class Inner:
    port: Port
    names: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Outer:
    number: int
    share: float = 0.0
    inner: Inner | None = None
    pair: tuple[int, str] = (0, "")
    state: Literal["a", "b"] = "a"
    by_name: Mapping[str, Inner] | None = None


FULL = Outer(1, 0.5, Inner(80, ("x", "y")), (2, "z"), "b", {"c": Inner(1)})


@pytest.mark.parametrize("record", [FULL, Outer(-1)])
def test_what_is_packed_is_read(record: Outer) -> None:
    assert codec.read(Outer, codec.pack(record)) == record
    assert codec.build(Outer, codec.plain(record)) == record


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([], r"\[\] is not of type Outer"),
        ({}, "missing 1 required positional argument: 'number'"),
        ({"number": True}, "Outer.number: True is not of type int"),
        ({"number": 1.5}, "Outer.number: 1.5 is not of type int"),
        ({"number": 1, "share": "x"}, "'x' is not of type float"),
        ({"number": 1, "share": float("inf")}, "Outer.share: inf is not finite"),
        ({"number": 1, "share": 10**400}, "Outer.share: 1000.*0 is not finite"),
        ({"number": 1, "share": float("nan")}, "nan is not finite"),
        ({"number": 1, "more": 1}, "Outer has no field 'more'"),
        ({"number": 1, "inner": {"port": 0}}, "Outer.inner: Inner.port: 0 is not from 1 to 65535"),
        ({"number": 1, "inner": {"port": 1, "names": ["n" * 513]}}, "the length 513 is more than 512"),
        ({"number": 1, "pair": [1]}, r"\[1\] is not of type tuple"),
        ({"number": 1, "state": "c"}, "'c' is not of type"),
        ({"number": 1, "by_name": []}, r"\[\] is not of type Mapping"),
    ],
)
def test_what_is_no_record_is_refused(values: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        codec.build(Outer, values)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        codec.read(Outer, data)


def test_annotations_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codec.build(Outer, {"number": 1})
    monkeypatch.setattr(codec, "_reader", lambda hint: pytest.fail(f"{hint} is read again"))
    assert codec.build(Outer, {"number": 2}) == Outer(2)


def test_a_task_takes_no_readers_along() -> None:
    codec.build(Outer, {"number": 1})
    assert pickle.loads(pickle.dumps(codec._readers)) == {}


@pytest.mark.parametrize(
    "message",
    [
        messages.Fork("model", ("lock",), 4711, {"A": "1"}, ("folder", "8")),
        messages.Retire(),
        messages.NodeResult(b"report", {3: "/tmp/value"}, (messages.Rest(3, 1, "/tmp/log", 5),), False),
    ],
)
def test_messages_of_private_lines_may_hold_bytes(message: messages.Message) -> None:
    assert messages.decode(messages.encode(message)) == message


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([], "no message of kind None"),
        ({"kind": "Message"}, "no message of kind 'Message'"),
        ({"kind": []}, r"no message of kind \[\]"),
        ({"kind": "Beat"}, "missing 1 required positional argument: 'alive'"),
        ({"kind": "Failed", "failure": {"rank": "0"}}, "Failed.failure: Failure.rank: '0' is not of type int"),
    ],
)
def test_what_is_no_message_is_refused(wrong: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        messages.decode(wrong)


FILE = Entry("ckpt/a.pt", 3, 0o644, 5, "00")
LONG = "x" * 1000
FACTS = NodeFacts(0, "a", "host-a", "10.0.0.1", 1)
FAILURE = Failure(3, 0, "host-b", "exit", "exited with code 3", time=5.0)
INFINITE = float("inf")


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (messages.TaskFacts("", 2**63, "", FACTS), "TaskFacts.attempt: 9223372036854775808 is not from 0"),
        (messages.TaskFacts("w" * 1000, 0, "", FACTS), "TaskFacts.stage_attempt: the length 1000"),
        *(
            (messages.TaskFacts("", 0, "", replace(FACTS, **{name: value})), f"NodeFacts.{name}: ")
            for name, value in (*(("partition", -1), ("host", LONG), ("gpus", (LONG,)), ("versions", {"torch": LONG})),)
        ),
        (messages.Importing("b", 2, "m" * 1000), "Importing.module: the length 1000"),
        (messages.Hello("a" * 1000), "Hello.node: the length 1000"),
        (messages.Hello("a", secret="s" * 1000), "Hello.secret: the length 1000"),
        (messages.Beat(-1), "Beat.alive: -1"),
        (messages.Beat(1, -1.0), "Beat.idle: -1.0"),
        (messages.Reached(-1, True, 5, attempt=0), "Reached.number: -1"),
        (messages.Reached(1, False, 2**80, attempt=0), "Reached.step"),
        (messages.Halted(3, -1, attempt=0), "Halted.step: -1"),
        (messages.Skipped(3, 4, 5, 1000), "Skipped.stream: 4 is not from 1 to 3"),
        (messages.Skipped(3, 1, -5, 1000), "Skipped.lines: -5"),
        (messages.StackDump(0, 3, "x" * (1 << 20)), "StackDump.text: the length 1048576"),
        (messages.UnfitNode("h", "x" * 20_000), "UnfitNode.why: the length 20000"),
        (messages.Failed(replace(FAILURE, time=INFINITE), attempt=0), "Failure.time: inf is not finite"),
        (
            messages.Stopped(1, (Outcome(3, "", "failed", called=-INFINITE),), attempt=0),
            "Outcome.called: -inf is not finite",
        ),
        (messages.Stopped(0, (), attempt=0), "Stopped.port: 0"),
        (messages.Finished(NodeReport(1, "b", times={"task": INFINITE})), "NodeReport.times: inf"),
        (messages.Delete("../a"), "Delete.path: the path '../a' is not relative"),
        *(
            (messages.Upload(replace(FILE, **{name: value})), f"Upload.entry: Entry.{name}: ")
            for name, value in (
                *(("path", path) for path in ("/etc/passwd", "a/../../b", "", "a\0b", "a//b", "a" * 5000)),
                *(("size", -1), ("mtime_ns", 2**63), ("mode", 0o4755)),
            )
        ),
    ],
)
def test_a_message_beyond_its_bounds_is_refused(message: messages.Message, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        messages.decode(messages.encode(message))
