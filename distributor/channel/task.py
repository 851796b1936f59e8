"""Connections from a Spark task or a node to the driver, for code that does not use asyncio.

A task uses such a connection to send facts about its node and to get the facts of all tasks. A node uses such a
connection to send a rank's return value or a file that the node's ranks have written, or to get the files that are in
``output_dir`` on the driver.

The *facts* of a task describe its node: address, port, GPUs, CPUs and more. The facts are exchanged once, before any
task starts its work. Over the channel (the connection to the driver), tasks get the facts of all tasks as soon as the
driver has received them, whereas Spark's own ``allGather`` polls once a second.

Either all tasks exchange facts over the channel to the driver, or all use Spark's ``allGather``, because ``allGather``
waits for all tasks. A task that cannot reach the driver for :data:`CONNECT_TIMEOUT` seconds uses ``allGather``. The
driver then lacks the facts of that task, and tells the other tasks to use ``allGather`` too.

This module uses the standard library only, because it is pickled by value into Spark's Python workers, where other
packages may be missing.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

from distributor.channel.lines import PIECE, Endpoint, connect, fill, pack, read
from distributor.values.files import make_way
from distributor.values.messages import (
    AllFacts,
    Deposit,
    Fetch,
    Message,
    Offer,
    Proceed,
    Received,
    Refused,
    Sent,
    Stop,
    TaskFacts,
    Value,
    Withdraw,
)

#: Seconds that a task tries to reach the driver before it exchanges facts through Spark's ``allGather``. No task may
#: give up sooner: the driver assumes that tasks which have not reached it do not begin their work before this time has
#: passed.
CONNECT_TIMEOUT = 5.0

#: Seconds between attempts to reach the driver.
_RETRY = 0.2

#: Maximum number of times that a value is sent if the connection breaks.
_SENDINGS = 2


class StoppedError(Exception):
    """The driver has stopped the run: the task must not begin its work, or its return value is no longer needed."""


class RefusedError(Exception):
    """The driver refuses a file that a node sends, for example because of its size."""


def exchange(
    mine: Mapping[str, Any],
    attempt: tuple[str, int],
    endpoint: Endpoint | None,
    gather: Callable[[str], Iterable[str]],
    patience: float,
) -> tuple[list[dict[str, Any]], bool]:
    """Exchange this task's facts (address, GPUs and more) for the facts of all tasks of the run.

    Args:
        mine: the task's facts as plain values, including its ``"partition"``.
        attempt: two values. The first is shared by all tasks that Spark started together. If Spark starts the tasks
            again on the same executors, they share it with the earlier tasks, too. The second is the number of this
            task attempt; later attempts have higher numbers.
        endpoint: where the driver listens; ``None`` to use ``gather`` without trying to reach the driver.
        gather: ``BarrierTaskContext.allGather``.
        patience: number of seconds without contact after which the driver counts as lost. This limit applies once the
            task has reached the driver.

    Returns:
        The facts of all tasks, ordered by partition, and whether they came from the driver.

    Raises:
        StoppedError: the run must not begin, or the driver was reached earlier and is now gone.
    """
    wave, number = attempt
    told = _over_channel(TaskFacts(wave, number, mine["partition"], dict(mine)), endpoint, patience)
    everyone = told if told is not None else [json.loads(text) for text in gather(json.dumps(mine))]
    return sorted(everyone, key=lambda entry: entry["partition"]), told is not None


def tell(endpoint: Endpoint, told: Iterable[Message], timeout: float = CONNECT_TIMEOUT) -> None:
    """Send messages to the driver and wait until the driver has read them.

    Args:
        endpoint: where the driver listens.
        told: the messages to send, in this order.
        timeout: seconds that each network operation may take.

    Raises:
        OSError: the driver cannot be reached in time.
    """
    with connect(endpoint, timeout) as line:
        for message in told:
            line.sendall(pack(message))
        while line.recv(4096):  # until the driver ends the connection
            pass


def send_value(endpoint: Endpoint, value: Value, content: bytes | str, patience: float) -> Sent:
    """Send a rank's return value to the driver.

    Args:
        endpoint: where the driver listens.
        value: the message that announces the return value, with its rank and size.
        content: the pickled value, or the path of a file that holds it.
        patience: number of seconds without progress after which the driver counts as lost.

    Raises:
        StoppedError: the run was stopped.
        OSError: each of :data:`_SENDINGS` attempts failed: the driver could not be reached, the driver refused the
            value, or the connection broke.
        ValueError: the driver's answer is not a valid message.
    """
    for _ in range(_SENDINGS - 1):
        try:
            return _send_value(endpoint, value, content, patience)
        except OSError:
            pass
    return _send_value(endpoint, value, content, patience)


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


def send_file(endpoint: Endpoint, told: Deposit | Withdraw, source: str | None, patience: float) -> None:
    """Tell the driver about a new or removed file, and send a new file's bytes if the driver asks for them.

    Args:
        endpoint: where the driver listens.
        told: says which file is new or was removed.
        source: the file's path on this machine; ``None`` if the driver needs no bytes.
        patience: number of seconds without progress after which the driver counts as lost.

    Raises:
        RefusedError: the driver refuses the file.
        OSError: the driver cannot be reached, the connection broke, or the file became shorter as it was sent.
        ValueError: the driver's answer is not a valid message.
    """
    with connect(endpoint, CONNECT_TIMEOUT) as line:
        line.settimeout(patience)
        line.sendall(pack(told))
        answer = read(line)
        if isinstance(answer, Proceed) and isinstance(told, Deposit) and source is not None:
            with open(source, "rb") as file:
                _send_exactly(file, told.entry.size, line)
            answer = read(line)
        if isinstance(answer, Refused):
            raise RefusedError(answer.why)
        if not isinstance(answer, Received):
            raise ConnectionError(f"unexpected answer from the driver: {answer}")


def fetch_files(endpoint: Endpoint, told: Fetch, folder: str, patience: float, wanted: Callable[[str], bool]) -> None:
    """Get the files that are in ``output_dir`` on the driver.

    Args:
        endpoint: where the driver listens.
        told: the request for the files, with the node's name and secret.
        folder: the folder to which the files are written.
        patience: number of seconds without progress after which the driver counts as lost.
        wanted: returns whether to write the file with the given relative path. Other files are received and dropped.

    Raises:
        OSError: the driver cannot be reached, the connection broke, or a file cannot be written.
        ValueError: the driver's answer is not a valid message.
    """
    with connect(endpoint, CONNECT_TIMEOUT) as line:
        line.settimeout(patience)
        line.sendall(pack(told))
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
    """Read the driver's answer to the message that was sent over ``line``, a connection to the driver.

    Raises:
        StoppedError: the run was stopped.
        OSError: the connection has ended, or the answer is not of the given kind.
    """
    answer = read(line)
    if isinstance(answer, Stop):
        raise StoppedError(answer.reason)
    if not isinstance(answer, kind):
        raise ConnectionError(f"unexpected answer from the driver: {answer}")


def _over_channel(message: TaskFacts, endpoint: Endpoint | None, patience: float) -> list[dict[str, Any]] | None:
    """Send this task's facts (address, GPUs and more) to the driver, and return the facts of all tasks.

    Return ``None`` if this or another task cannot reach the driver.
    """
    if endpoint is None:
        return None
    told = False  # once True, the driver may have the facts, and the task must wait for its answer
    end = time.monotonic() + CONNECT_TIMEOUT
    while True:
        try:
            with connect(endpoint, CONNECT_TIMEOUT) as line:
                told, end = True, time.monotonic() + patience
                line.sendall(pack(message))
                _wait_for_ever(line, patience)
                answer = read(line)
            break
        except (OSError, ValueError):
            pass
        if time.monotonic() > end:
            if not told:
                return None
            raise StoppedError(f"heard nothing from the driver for {patience:g} s")
        time.sleep(_RETRY)
    if isinstance(answer, Stop):
        raise StoppedError(answer.reason)
    return list(answer.facts) if isinstance(answer, AllFacts) else None


def _wait_for_ever(line: socket.socket, patience: float) -> None:
    """Let a connection wait without a time limit for the answer to a task's facts, since other tasks may start late.

    If the driver's machine fails, TCP keepalive detects the failure within about ``patience`` seconds.
    """
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):  # tcp(7); available on Linux
        if hasattr(socket, option):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, int(patience / 6)))
    if hasattr(socket, "TCP_KEEPCNT"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
