"""TLS connections to the driver or to agents of other nodes, without asyncio: messages, and raw bytes after some.

Pickled by value into Spark's Python workers, where other packages may be missing: standard library only.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct

from distributor.machine import network
from distributor.values import messages
from distributor.values.messages import Message

Endpoint = tuple[str, int, str, bytes]  # host, port, certificate (PEM), token

CONNECT_TIMEOUT = 5.0  # seconds for each network operation

PIECE = 256 << 10  # bytes read or sent at a time


def connect(endpoint: Endpoint, timeout: float = CONNECT_TIMEOUT) -> ssl.SSLSocket:
    """Connect to the driver or an agent, and show the token.

    OSError if it cannot be reached or has another certificate.
    """
    host, port, certificate, token = endpoint
    line = socket.create_connection((host, port), timeout)
    try:
        # A message need not wait until the token is confirmed.
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = network.pinned_tls(certificate).wrap_socket(line)
    except BaseException:
        line.close()
        raise
    tls.sendall(token)
    return tls


def pack(message: Message) -> bytes:
    """Return a message as a frame of ``channel.frames``, whose import would load asyncio in Spark's Python workers."""
    body = json.dumps(messages.encode(message)).encode()
    return struct.pack("!IB", len(body), 1) + body


def read(line: socket.socket, limit: int | None = None) -> Message:
    """Read the next message.

    OSError if the connection ends before, ValueError if the bytes are no message or more than ``limit``.
    """
    length, _ = struct.unpack("!IB", exactly(line, 5))
    if limit is not None and length > limit:
        raise ValueError(f"a message of {length} bytes is longer than allowed ({limit})")
    return messages.decode(json.loads(exactly(line, length)))


def exactly(line: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes; OSError if the connection ends before."""
    data = bytearray(size)
    fill(line, memoryview(data))
    return bytes(data)


def fill(line: socket.socket, room: memoryview) -> None:
    """Read bytes until ``room`` is full; OSError if the connection ends before."""
    while room:
        count = line.recv_into(room[:PIECE])
        if not count:
            raise ConnectionError("the connection has ended")
        room = room[count:]
