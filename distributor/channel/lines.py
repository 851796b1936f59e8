"""Connections to the driver, or to agents of other nodes, in code without an event loop.

A connection uses TLS, and carries messages and the bytes that follow them.

This module uses the standard library only, because it is pickled by value into Spark's Python workers, where other
packages may be missing.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct

from distributor.machine import network
from distributor.values import messages
from distributor.values.messages import Message

#: Where a server listens: host, port, certificate (PEM), token.
Endpoint = tuple[str, int, str, bytes]

#: Number of seconds that making a connection may take, unless the caller says otherwise.
CONNECT_TIMEOUT = 5.0

#: Number of bytes that are read or sent at a time.
PIECE = 256 << 10


def connect(endpoint: Endpoint, timeout: float = CONNECT_TIMEOUT) -> ssl.SSLSocket:
    """Connect to a server of the run (the driver, or an agent), and show the token.

    Raises:
        OSError: the server cannot be reached, or does not have the expected certificate.
    """
    host, port, certificate, token = endpoint
    line = socket.create_connection((host, port), timeout)
    try:
        tls = network.pinned_tls(certificate).wrap_socket(line)
    except BaseException:
        line.close()
        raise
    tls.sendall(token)
    return tls


def pack(message: Message) -> bytes:
    """Return a message as a frame, as ``channel.frames.pack`` does.

    ``channel.frames.pack`` is not used here, because importing its module would load asyncio in Spark's workers.
    """
    body = json.dumps(messages.encode(message)).encode()
    return struct.pack("!IB", len(body), 1) + body


def read(line: socket.socket, limit: int | None = None) -> Message:
    """Read the next message.

    Args:
        line: the connection.
        limit: maximum number of bytes of the message; ``None`` for no limit.

    Raises:
        OSError: the connection has ended before the message was complete.
        ValueError: the bytes are not a message, or are too many.
    """
    length, _ = struct.unpack("!IB", exactly(line, 5))
    if limit is not None and length > limit:
        raise ValueError(f"a message of {length} bytes is longer than allowed ({limit})")
    return messages.decode(json.loads(exactly(line, length)))


def exactly(line: socket.socket, size: int) -> bytes:
    """Read the given number of bytes.

    Raises:
        OSError: the connection has ended before all bytes had arrived.
    """
    data = bytearray(size)
    fill(line, memoryview(data))
    return bytes(data)


def fill(line: socket.socket, room: memoryview) -> None:
    """Read bytes until ``room`` is full.

    Raises:
        OSError: the connection has ended before all bytes had arrived.
    """
    while room:
        count = line.recv_into(room[:PIECE])
        if not count:
            raise ConnectionError("the connection has ended")
        room = room[count:]
