"""What a task that leads an executor does with the result of its agent."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributor.schedulers.spark import task
from distributor.values.files import Entry
from distributor.values.messages import FileLeft, NodeResult, Rest
from distributor.values.placement import NodeFacts

FILE = FileLeft(Entry("model.pt", 7, 0o644, 0, "digest"), None, "uploaded")


def lead(result: NodeResult | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bytes], bytes | None]:
    """The rows that a task yields for a result, and what it returns."""

    @contextmanager
    def host_node(*_: object) -> Iterator[Any]:
        agent = SimpleNamespace(note=None)
        yield SimpleNamespace(folder="", start=lambda *_, **__: agent, converse=lambda order: result)

    monkeypatch.setattr(task, "host_node", host_node)
    monkeypatch.setattr(task, "_write_package", lambda *_: "")
    monkeypatch.setattr(task, "_order", lambda *_, **__: None)
    mine = NodeFacts(0, "a", "host-a", "10.0.0.1", 1)
    shipment: Any = {"job_id": "r1", "endpoint": None, "warmth": None, "chunk": 3, "call": None}
    rows: Generator[bytes, None, bytes | None]
    rows, yielded = task._lead(shipment, {}, mine, 1, socket.socket(), {}, "secret"), []
    while True:
        try:
            yielded.append(next(rows))
        except StopIteration as end:
            return yielded, end.value


@pytest.mark.parametrize("linked", [True, False])
def test_a_large_call_that_spark_has_brought_is_linked_or_copied(
    linked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not linked:
        monkeypatch.setattr(os, "link", lambda *_: os.stat("/no/such/file"))
    source, path = tmp_path / "broadcast", tmp_path / "call"
    source.write_bytes(b"a call")
    task._bring_call(SimpleNamespace(_path=str(source)), str(path))
    assert os.path.samefile(source, path) == linked
    source.unlink()  # as when the broadcast is destroyed
    assert path.read_bytes() == b"a call"


def test_a_call_that_spark_has_decrypted_is_written(tmp_path: Path) -> None:
    task._bring_call(SimpleNamespace(value=b"a call"), str(tmp_path / "call"))
    assert (tmp_path / "call").read_bytes() == b"a call"


def failed(**about: Any) -> NodeResult:
    return NodeResult(b"eport", {}, about.pop("rest", ()), True, **about)


def test_a_failed_nodes_report_alone_may_go_over_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lead(failed(), monkeypatch) == ([], b"Report")
    assert lead(None, monkeypatch) == ([], b"Lhost-a")


def test_what_the_channel_did_not_bring_goes_through_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver is told, unless it knows since the channel is gone."""
    (tmp_path / "log").write_bytes(b"a line")
    rows, told = lead(failed(rest=(Rest(0, 1, str(tmp_path / "log"), 2),)), monkeypatch)
    assert ([row[:1] for row in rows], told) == ([b"R", b"G", b"G"], b"")
    rows, told = lead(failed(files=(FILE,)), monkeypatch)
    assert ([row[:1] for row in rows], told) == ([b"R", b"F"], b"")
    assert lead(failed(cut=True), monkeypatch) == ([b"Report"], None)


def test_a_node_that_has_succeeded_reports_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, told = lead(NodeResult(b"eport", {0: b"value"}, (), False), monkeypatch)
    assert ([row[:1] for row in rows], told) == ([b"R", b"V", b"V"], None)
