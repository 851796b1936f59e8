"""How every task of a run learns what the others have to say, once, before any of them starts something.

Over the channel the driver answers as soon as it has heard all; Spark's own ``allGather`` polls once a second. Either
all tasks use the one or all use the other: a task that cannot reach the driver for :data:`CONNECT_TIMEOUT` goes to
``allGather``, and the driver, which then does not hear of it, sends the others there. Standard library only, pickled by
value into workers.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distributor.machine import network

#: Where the driver listens: host, port, certificate (PEM), token.
Endpoint = tuple[str, int, str, bytes]

#: Seconds to reach the driver before a task goes another way, and not less: before them, a run that nobody has told the
#: driver of cannot have begun.
CONNECT_TIMEOUT = 5.0

#: Seconds before another attempt.
_RETRY = 0.2


class StoppedError(Exception):
    """The run was stopped before it began."""


def exchange(
    mine: Mapping[str, Any],
    attempt: tuple[str, int],
    endpoint: Endpoint | None,
    gather: Callable[[str], Iterable[str]],
    patience: float,
) -> tuple[list[dict[str, Any]], bool]:
    """Tells all tasks of a run what this one has to say.

    Args:
        mine: plain values, with the task's ``"partition"``.
        attempt: what this task has in common with those alone that Spark started with it, and the number of this
            attempt, higher than that of any before.
        endpoint: the driver, ``None`` to use ``gather`` without asking.
        gather: ``BarrierTaskContext.allGather``.
        patience: seconds that a driver that was reached may be silent.

    Returns:
        What all tasks have to say, by partition, and whether the driver told it.

    Raises:
        StoppedError: the run is not to begin, or the driver that was reached is gone.
    """
    told = _over_channel({"event": "facts", "attempt": attempt, "facts": mine}, endpoint, patience)
    everyone = told if told is not None else [json.loads(text) for text in gather(json.dumps(mine))]
    return sorted(everyone, key=lambda entry: entry["partition"]), told is not None


def tell(endpoint: Endpoint, events: Iterable[Mapping[str, Any]], timeout: float = CONNECT_TIMEOUT) -> None:
    """Tells the driver some events and waits until it has read them.

    Args:
        endpoint: the driver.
        events: what it is told.
        timeout: seconds that one step of that may take.

    Raises:
        OSError: it cannot be reached in time.
    """
    with _connect(endpoint, timeout) as line:
        for event in events:
            line.sendall(_pack(event))
        while line.recv(4096):  # until the driver ends the connection
            pass


def _over_channel(
    message: Mapping[str, Any], endpoint: Endpoint | None, patience: float
) -> list[dict[str, Any]] | None:
    """What the driver answers; ``None`` if it cannot be reached, or says that another task cannot reach it."""
    if endpoint is None:
        return None
    told = False  # from then on the driver may count on this task, and this task has to wait for the driver's word
    end = time.monotonic() + CONNECT_TIMEOUT
    while True:
        try:
            with _connect(endpoint) as line:
                told, end = True, time.monotonic() + patience
                line.sendall(_pack(message))
                _wait_for_ever(line, patience)
                answer = _read(line)
            break
        except (OSError, ValueError):
            pass
        if time.monotonic() > end:
            if not told:
                return None
            raise StoppedError(f"heard nothing from the driver for {patience:g} s")
        time.sleep(_RETRY)
    if answer["order"] == "stop":
        raise StoppedError(answer["reason"])
    facts: list[dict[str, Any]] | None = answer["facts"] if answer["order"] == "facts" else None
    return facts


def _wait_for_ever(line: socket.socket, patience: float) -> None:
    """Other tasks may take long to come; the kernel asks meanwhile whether the driver's machine still answers."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):  # tcp(7); Linux has them
        if hasattr(socket, option):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, int(patience / 6)))
    if hasattr(socket, "TCP_KEEPCNT"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)


def _connect(endpoint: Endpoint, timeout: float = CONNECT_TIMEOUT) -> socket.socket:
    host, port, certificate, token = endpoint
    line = socket.create_connection((host, port), timeout)
    try:
        tls = network.pinned_tls(certificate).wrap_socket(line)
    except BaseException:
        line.close()
        raise
    tls.sendall(token)
    return tls


def _pack(message: Mapping[str, Any]) -> bytes:
    """As ``channel.frames.pack`` does it: that module would bring asyncio into Spark's workers."""
    body = json.dumps(message).encode()
    return struct.pack("!IB", len(body), 1) + body


def _read(line: socket.socket) -> dict[str, Any]:
    """The next message.

    Raises:
        OSError: the connection has ended before.
    """
    length, _ = struct.unpack("!IB", _exactly(line, 5))
    message: dict[str, Any] = json.loads(_exactly(line, length))
    return message


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            raise ConnectionError("the connection has ended")
        data += piece
    return data
