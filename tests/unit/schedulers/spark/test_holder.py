"""Which task of a failed run holds the job, and which rows go where."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from distributor.channel import tasks
from distributor.machine import network
from distributor.schedulers.spark import holder

COURIER_AT = ("10.0.0.2", 4000)


@pytest.mark.parametrize(
    ("executors", "chosen"),
    [
        pytest.param("aabb", (3, None), id="the-last-sibling"),
        pytest.param("aab", (1, None), id="the-only-sibling"),
        pytest.param("abc", (0, 1), id="no-sibling"),
        pytest.param("a", None, id="one-task"),
    ],
)
def test_the_holder_and_its_courier(executors: str, chosen: tuple[int, int | None] | None) -> None:
    assert tasks.choose_roles(executors) == chosen


class Accumulator:
    def __init__(self) -> None:
        self.added: list[Any] = []

    def add(self, update: Any) -> None:
        self.added += update


@pytest.mark.parametrize(
    ("roles", "partition", "taken", "added", "kept"),
    [
        pytest.param((3, None), 0, None, (0, (b"row",)), [], id="a-leader"),
        pytest.param((3, None), 3, None, None, [b"row"], id="the-holder"),
        pytest.param((0, 1), 1, [b"held"], (1, (b"row", b"held")), [], id="the-courier"),
        pytest.param((0, 1), 1, None, None, [b"row"], id="a-courier-that-hears-nothing"),
    ],
)
def test_who_sends_which_rows(
    monkeypatch: pytest.MonkeyPatch,
    roles: tuple[int, int | None],
    partition: int,
    taken: list[bytes] | None,
    added: tuple[int, tuple[bytes, ...]] | None,
    kept: list[bytes],
) -> None:
    held: list[bool] = []
    monkeypatch.setattr(holder._Job, "await_end", lambda _: held.append(True))
    monkeypatch.setattr(holder, "_take_rows", lambda *_: taken)
    shipment: Any = {"key": b"k", "patience": 7.0, "endpoint": None}
    rows = Accumulator()
    line: Any = None
    assert (
        holder.hand_over(
            shipment, None if roles[1] is None else COURIER_AT, roles, partition, [b"row"], line, rows, True
        )
        == kept
    )
    assert rows.added == ([] if added is None else [added])
    assert held == ([True] if partition == roles[0] else [])


@pytest.mark.parametrize("accepted", [True, False])
def test_the_holder_holds_only_once_the_courier_has_its_rows(monkeypatch: pytest.MonkeyPatch, accepted: bool) -> None:
    held: list[bool] = []
    sent: list[Any] = []
    monkeypatch.setattr(holder._Job, "await_end", lambda _: held.append(True))
    monkeypatch.setattr(holder, "_send_rows", lambda to, *_: sent.append(to) or accepted)
    shipment: Any = {"key": b"k", "patience": 7.0, "endpoint": None}
    line: Any = None
    assert holder.hand_over(shipment, COURIER_AT, (0, 1), 0, [b"row"], line, Accumulator(), True) == [b"row"]
    assert (sent, held) == ([COURIER_AT], [True] if accepted else [])


@pytest.mark.parametrize("partition", [0, 1], ids=["the-holder", "the-courier"])
@pytest.mark.parametrize("reached", [True, False])
def test_a_task_waits_no_longer_than_the_job(partition: int, reached: bool) -> None:
    """The other task hears nothing and sends nothing. The driver's port is closed: at once, or after the first look."""
    driver, other, mine = (network.listen("127.0.0.1") for _ in range(3))
    address, port = driver.getsockname()
    shipment: Any = {"key": b"k", "patience": 600.0, "endpoint": (address, port)}
    if reached:
        driver.close()
    else:
        threading.Thread(target=_accept_once, args=(driver,), daemon=True).start()
    kept = holder.hand_over(shipment, other.getsockname(), (0, 1), partition, [b"row"], mine, Accumulator(), reached)
    assert kept == [b"row"]
    for each in (other, mine):
        each.close()


def _accept_once(listener: socket.socket) -> None:
    line, _ = listener.accept()
    listener.close()
    line.close()
