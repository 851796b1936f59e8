"""Which way a task sends a return value."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import pytest

from distributor.channel import task as exchange
from distributor.schedulers.spark import task
from distributor.values import messages

CONTENT = b"0123456789"
VALUE = messages.Value(3, 0, "executor", "secret")
DIGEST = hashlib.sha256(CONTENT).digest()
IN_BAND = [b"V" + struct.pack("!I", 3) + piece for piece in (b"01234567", b"89")]
ANNOUNCED = [b"D" + struct.pack("!IQ", 3, len(CONTENT)) + DIGEST]


@pytest.mark.parametrize(
    ("large", "reached", "endpoint", "end", "rows"),
    [
        pytest.param(10, True, ("host", 1, "", b""), None, ANNOUNCED, id="over-the-channel"),
        pytest.param(11, True, ("host", 1, "", b""), None, IN_BAND, id="small"),
        pytest.param(10, False, ("host", 1, "", b""), None, IN_BAND, id="driver-not-reached"),
        pytest.param(10, True, None, None, IN_BAND, id="driver-does-not-listen"),
        pytest.param(10, True, ("host", 1, "", b""), OSError("broken"), IN_BAND, id="broken"),
        pytest.param(10, True, ("host", 1, "", b""), TimeoutError("no progress"), IN_BAND, id="stuck"),
        pytest.param(10, True, ("host", 1, "", b""), ValueError("no message"), IN_BAND, id="not-our-driver"),
        pytest.param(10, True, ("host", 1, "", b""), exchange.StoppedError("cancelled"), [], id="stopped"),
    ],
)
def test_the_way_of_a_value(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    large: int,
    reached: bool,
    endpoint: exchange.Endpoint | None,
    end: Exception | None,
    rows: list[bytes],
) -> None:
    def send(to: exchange.Endpoint, value: messages.Value, path: str, patience: float) -> tuple[int, bytes]:
        assert (to, value, patience) == (endpoint, VALUE, 2.0)
        if end is not None:
            raise end
        return len(CONTENT), DIGEST

    monkeypatch.setattr(task, "_LARGE", large)
    monkeypatch.setattr(exchange, "send_value", send)
    path = tmp_path / "rank-3.value"
    path.write_bytes(CONTENT)
    shipment: Any = {"endpoint": endpoint, "silence": 2.0, "chunk": 8}
    assert list(task._value(shipment, VALUE, str(path), reached)) == rows
