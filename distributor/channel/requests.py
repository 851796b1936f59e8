"""Connections to the driver without asyncio: a task's for facts, a node's for return values and files.

The facts are exchanged once, before any task starts its work. The channel answers as soon as the driver has them all,
whereas Spark's ``allGather`` polls once a second. Since ``allGather`` waits for all tasks, all must go one way: a task
that cannot reach the driver for :data:`CONNECT_TIMEOUT` uses ``allGather``, and the driver, which lacks its facts,
tells the others to do so too.

Pickled by value into Spark's Python workers, where other packages may be missing: standard library only.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import BinaryIO, TypeVar, cast

from distributor.channel.connections import PIECE, Endpoint, connect, fill, pack, read
from distributor.values import messages
from distributor.values.files import make_way
from distributor.values.messages import (
    Delete,
    FailedReport,
    Fetch,
    Message,
    Offer,
    Placed,
    Proceed,
    Received,
    Refused,
    Sent,
    Stop,
    TaskFacts,
    Upload,
    Value,
)

T = TypeVar("T")

#: Seconds before a task uses ``allGather``, and no sooner: the driver assumes that tasks which have not reached it do
#: not begin their work before.
CONNECT_TIMEOUT = 5.0

_RETRY = 0.2  # seconds between attempts to reach the driver

_SENDINGS = 2  # times that a value or a report is sent if the connection breaks


class StoppedError(Exception):
    """The run was stopped: the task must not begin, or its value is no longer needed."""


class RequestRefusedError(Exception):
    """The driver refuses a file, for example because of its size."""


def exchange(
    mine: TaskFacts, endpoint: Endpoint | None, gather: Callable[[str], Iterable[str]], patience: float
) -> tuple[list[Message], list[TaskFacts]]:
    """Exchange this task's facts for the driver's answer or, through Spark, for the facts of all tasks by partition.

    The driver answers ``Placed``, perhaps with ``AllNodes``. ``gather`` is ``allGather``. StoppedError if the run must
    not begin, or the driver, once reached, is silent for ``patience`` seconds.
    """
    answer = _over_channel(mine, endpoint, patience)
    if answer is not None:
        return answer, []
    everyone = [messages.decode(json.loads(text)) for text in gather(json.dumps(messages.encode(mine)))]
    return [], sorted(cast(list[TaskFacts], everyone), key=lambda task: task.partition)


def tell(endpoint: Endpoint, sent: Iterable[Message], timeout: float = CONNECT_TIMEOUT) -> None:
    """Send messages to the driver, and wait until it has read them; OSError if it cannot be reached in time."""
    with connect(endpoint, timeout) as line:
        for message in sent:
            line.sendall(pack(message))
        while line.recv(4096):  # until the driver ends the connection
            pass


def send_failed_report(endpoint: Endpoint, announcement: FailedReport, report: bytes, patience: float) -> None:
    """Send a node's report, and wait until the driver ends the connection, at most ``patience`` seconds.

    OSError if each of :data:`_SENDINGS` attempts to send it failed, the connection breaks later, or the time is up.
    """
    with ExitStack() as lines:

        def send() -> socket.socket:
            line = lines.enter_context(connect(endpoint, CONNECT_TIMEOUT))
            line.sendall(pack(announcement) + report)
            return line

        line = _repeated(send)
        line.settimeout(patience)
        line.recv(1)


def send_value(endpoint: Endpoint, value: Value, content: bytes | str, patience: float) -> Sent:
    """Send a rank's pickled value, or the file of this path that holds it.

    ``patience`` is seconds without progress. StoppedError if the run was stopped; OSError if each of :data:`_SENDINGS`
    attempts failed because the driver was out of reach or refused the value, or the connection broke.
    """
    return _repeated(lambda: _send_value(endpoint, value, content, patience))


def _repeated(send: Callable[[], T]) -> T:
    """Return what ``send`` returns, called up to :data:`_SENDINGS` times while it raises OSError."""
    for _ in range(_SENDINGS - 1):
        with suppress(OSError):
            return send()
    return send()


def _send_value(endpoint: Endpoint, value: Value, content: bytes | str, patience: float) -> Sent:
    source = io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb", buffering=0)
    with source as file, connect(endpoint, CONNECT_TIMEOUT) as line:
        line.settimeout(patience)
        line.sendall(pack(value))
        _expect(Proceed, line)
        digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            line.sendall(buffer[:count])
        _expect(Received, line)
    return Sent(value.size, digest.digest())


def send_file(endpoint: Endpoint, message: Upload | Delete, source: str | None, patience: float) -> None:
    """Tell the driver about a new or removed file, and send the bytes that it asks for.

    RefusedError if it refuses the file; OSError if the connection breaks or the file becomes shorter meanwhile.
    """
    with connect(endpoint, CONNECT_TIMEOUT) as line:
        line.settimeout(patience)
        line.sendall(pack(message))
        answer = read(line)
        if isinstance(answer, Proceed) and isinstance(message, Upload) and source is not None:
            with open(source, "rb") as file:
                _send_exactly(file, message.entry.size, line)
            answer = read(line)
        if isinstance(answer, Refused):
            raise RequestRefusedError(answer.why)
        if not isinstance(answer, Received):
            raise ConnectionError(f"unexpected answer from the driver: {answer}")


def fetch_files(endpoint: Endpoint, fetch: Fetch, folder: str, patience: float, wanted: Callable[[str], bool]) -> None:
    """Write the driver's ``output_dir`` to a folder; files that are not wanted are received and dropped."""
    with connect(endpoint, CONNECT_TIMEOUT) as line:
        line.settimeout(patience)
        line.sendall(pack(fetch))
        while isinstance(offer := read(line), Offer):
            path = make_way(folder, offer.path) if wanted(offer.path) else os.devnull
            _receive(offer, path, line)
        if not isinstance(offer, Received):
            raise ConnectionError(f"unexpected answer from the driver: {offer}")


def _receive(offer: Offer, path: str, line: socket.socket) -> None:
    with open(path, "wb") as file:
        left, buffer = offer.size, memoryview(bytearray(PIECE))
        while left:
            piece = buffer[: min(left, PIECE)]
            fill(line, piece)
            file.write(piece)
            left -= len(piece)
    if path != os.devnull:
        os.chmod(path, offer.mode)
        os.utime(path, ns=(offer.mtime_ns, offer.mtime_ns))


def _send_exactly(file: BinaryIO, size: int, line: socket.socket) -> None:
    while size:
        piece = file.read(min(size, PIECE))
        if not piece:
            raise ConnectionError("a rank's file became shorter while its node was sending it to the driver")
        line.sendall(piece)
        size -= len(piece)


def _expect(kind: type[Message], line: socket.socket) -> None:
    """Read the driver's answer; StoppedError if it is to stop, OSError if it is of another kind."""
    answer = read(line)
    if isinstance(answer, Stop):
        raise StoppedError(answer.reason)
    if not isinstance(answer, kind):
        raise ConnectionError(f"unexpected answer from the driver: {answer}")


def _over_channel(message: TaskFacts, endpoint: Endpoint | None, patience: float) -> list[Message] | None:
    """Send this task's facts, and return the driver's answer; ``None`` if a task cannot reach the driver."""
    if endpoint is None:
        return None
    reached = False  # once True, the driver may have the facts, and the task must wait for its answer
    end = time.monotonic() + CONNECT_TIMEOUT
    while True:
        try:
            with connect(endpoint, CONNECT_TIMEOUT) as line:
                reached, end = True, time.monotonic() + patience
                line.sendall(pack(message))
                _wait_for_ever(line, patience)
                answer = [read(line)]
                if isinstance(answer[0], Placed) and answer[0].all_nodes:
                    answer.append(read(line))
            break
        except (OSError, ValueError):
            pass
        if time.monotonic() > end:
            if not reached:
                return None
            raise StoppedError(f"heard nothing from the driver for {patience:g} s")
        time.sleep(_RETRY)
    if isinstance(answer[0], Stop):
        raise StoppedError(answer[0].reason)
    return answer if isinstance(answer[0], Placed) else None


def _wait_for_ever(line: socket.socket, patience: float) -> None:
    """Wait for the answer without a limit, since other tasks may start late.

    If the driver's machine fails, TCP keepalive notices it within about ``patience`` seconds.
    """
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):  # tcp(7); available on Linux
        if hasattr(socket, option):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, int(patience / 6)))
    if hasattr(socket, "TCP_KEEPCNT"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
