"""Connections to the driver or to agents of other nodes, for code that does not use asyncio.

A connection uses TLS. It carries messages, some of which are followed by raw bytes, such as the content of a file.

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

#: Number of seconds that each network operation may take while a connection is made, unless the caller says otherwise.
CONNECT_TIMEOUT = 5.0

#: Number of bytes that are read or sent at a time.
PIECE = 256 << 10


def connect(endpoint: Endpoint, timeout: float = CONNECT_TIMEOUT) -> ssl.SSLSocket:
    """Connect to a server of the run (the driver, or an agent), and show it the token of ``endpoint``.

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
    """Return a message as a frame, as ``channel.frames.pack`` does, but without a check of its length.

    This function exists because importing ``channel.frames`` would load asyncio in Spark's Python workers.
    """
    body = json.dumps(messages.encode(message)).encode()
    return struct.pack("!IB", len(body), 1) + body


def read(line: socket.socket, limit: int | None = None) -> Message:
    """Read the next message from a connection.

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
    """Read ``size`` bytes from a connection.

    Raises:
        OSError: the connection has ended before all bytes had arrived.
    """
    data = bytearray(size)
    fill(line, memoryview(data))
    return bytes(data)


def fill(line: socket.socket, room: memoryview) -> None:
    """Read bytes from a connection until ``room`` is full.

    Raises:
        OSError: the connection has ended before all bytes had arrived.
    """
    while room:
        count = line.recv_into(room[:PIECE])
        if not count:
            raise ConnectionError("the connection has ended")
        room = room[count:]
