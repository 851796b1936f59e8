"""Which way a node's values go to the driver."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributor.channel import requests as exchange
from distributor.node import result_sender
from distributor.node.result_sender import ResultSender
from distributor.schedulers.spark import task
from distributor.values.messages import Finished, Sent, Value
from distributor.values.outcome import NodeReport, Outcome
from distributor.values.plan import AgentOrder

CONTENT = b"0123456789"
SENT = Sent(len(CONTENT), hashlib.sha256(CONTENT).digest())
ENDPOINT = ("host", 1, "", b"")
REPORT = NodeReport(0, "host", (Outcome(3, "host", "finished"),))
ORDER = AgentOrder(b"", "executor", [], [], "", "", [], ENDPOINT, False, secret="secret")


class Link:
    """A link to the driver that remembers what it was told."""

    def __init__(self, is_open: bool, is_orphaned: bool = False) -> None:
        self.is_open = is_open
        self.is_orphaned = is_orphaned
        self.told: list[Finished] = []

    def tell(self, message: Finished) -> None:
        self.told.append(message)


@pytest.mark.parametrize(
    ("reached", "endpoint", "end", "brought"),
    [
        pytest.param(True, ENDPOINT, None, {3: SENT}, id="over-the-channel"),
        pytest.param(False, ENDPOINT, None, {}, id="driver-not-reached"),
        pytest.param(True, None, None, {}, id="driver-does-not-listen"),
        pytest.param(True, ENDPOINT, OSError("broken"), {}, id="broken"),
        pytest.param(True, ENDPOINT, TimeoutError("no progress"), {}, id="stuck"),
        pytest.param(True, ENDPOINT, ValueError("no message"), {}, id="not-our-driver"),
    ],
)
def test_the_way_of_a_large_value(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reached: bool,
    endpoint: exchange.Endpoint | None,
    end: Exception | None,
    brought: dict[int, Sent],
) -> None:
    path = tmp_path / "rank-3.value"
    path.write_bytes(CONTENT)

    def send(to: exchange.Endpoint, value: Value, content: str, patience: float) -> Sent:
        assert (to, value, content, patience) == (endpoint, Value(3, 10, "executor", "secret"), str(path), 2.0)
        if end is not None:
            raise end
        return SENT

    monkeypatch.setattr(exchange, "send_value", send)
    link: Any = Link(reached)
    hands = ResultSender(replace(ORDER, endpoint=endpoint), link, 2.0)
    values: dict[int, bytes | str] = {3: str(path)}
    hands.announce(REPORT, values)
    assert link.told == ([Finished(REPORT, (), (3,))] if reached and endpoint else [])
    assert asyncio.run(hands.send(values)) == ({**values, **brought}, False)


@pytest.mark.parametrize(
    ("end", "orphaned", "sent"),
    [
        pytest.param(exchange.StoppedError("cancelled"), False, ({}, True), id="stopped"),
        pytest.param(OSError("refused"), True, ({0: CONTENT, 1: CONTENT}, False), id="driver-and-owner-are-gone"),
    ],
)
def test_what_nobody_waits_for_is_sent_once(
    monkeypatch: pytest.MonkeyPatch, end: Exception, orphaned: bool, sent: tuple[dict[int, bytes], bool]
) -> None:
    tried = []

    def send(to: exchange.Endpoint, value: Value, content: str, patience: float) -> Sent:
        tried.append(value.rank)
        raise end

    monkeypatch.setattr(result_sender, "_INLINE", 1)
    monkeypatch.setattr(exchange, "send_value", send)
    link: Any = Link(True, orphaned)
    hands = ResultSender(ORDER, link, 2.0)
    values: dict[int, bytes | str] = {0: CONTENT, 1: CONTENT}
    hands.announce(REPORT, values)
    assert asyncio.run(hands.send(values)) == sent
    assert tried == [0]


def test_small_values_travel_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for, and through Spark as well."""
    monkeypatch.setattr(result_sender, "_INLINE", 12)
    monkeypatch.setattr(exchange, "send_value", lambda to, value, content, patience: Sent(len(content), b"digest"))
    link: Any = Link(True)
    hands = ResultSender(ORDER, link, 2.0)
    values: dict[int, bytes | str] = {0: CONTENT, 1: CONTENT, 2: b"ab"}
    hands.announce(REPORT, values)
    texts = tuple((rank, base64.b64encode(value).decode()) for rank, value in ((0, CONTENT), (2, b"ab")))
    assert link.told == [Finished(REPORT, texts, (1,))]
    assert asyncio.run(hands.send(values)) == ({0: CONTENT, 1: Sent(10, b"digest"), 2: b"ab"}, False)


def test_the_rows_of_a_value() -> None:
    announced = b"D" + struct.pack("!IQ", 3, len(CONTENT)) + SENT.digest
    assert list(task._value(3, SENT, 8)) == [announced]
    assert list(task._value(3, CONTENT, 8)) == [b"V" + struct.pack("!I", 3) + piece for piece in (b"01234567", b"89")]
