"""What stands in for the driver behind the channel, and connections to it."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence

import psutil
import watch

from distributor.channel import connections
from distributor.values import messages
from distributor.values.outcome import Log
from distributor.values.plan import Endpoint

#: Bytes by which the driver may grow under attack: a few megabytes of buffers, however much was sent.
GROWTH = 128 << 20


def growth_under(attackers: Sequence[threading.Thread], deadline: float) -> int:
    """Run threads to their end, and return by how many bytes this process has grown at most meanwhile."""
    memory, end = psutil.Process().memory_info, time.monotonic() + deadline
    before = peak = memory().rss
    for attacker in attackers:
        attacker.start()
    while alive := [attacker for attacker in attackers if attacker.is_alive()]:
        assert time.monotonic() < end
        alive[0].join(0.01)
        peak = max(peak, memory().rss)
    return peak - before


class Listener:
    """Remembers what it was told, as the driver would."""

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self.events: list[tuple[str, messages.Message]] = []
        self.lost: list[tuple[str, str]] = []
        self.has: dict[tuple[int, int], int] = {}

    def on_log(self, log: Log) -> None:
        self.logs.append(log)
        self.has[log.rank, log.stream] = log.offset + len(log.data)

    def on_message(self, node: str, message: messages.Message) -> None:
        self.events.append((node, message))

    def on_lost(self, node: str, why: str) -> None:
        self.lost.append((node, why))

    def offsets(self, node: str) -> tuple[messages.Offset, ...]:
        return tuple((rank, stream, offset) for (rank, stream), offset in self.has.items())

    def heard(self, kind: type[messages.Message]) -> list[tuple[str, messages.Message]]:
        return [(node, message) for node, message in self.events if isinstance(message, kind)]


def hello(name: str = "node-a") -> messages.Hello:
    return messages.Hello(name)


def stranger(endpoint: Endpoint) -> ssl.SSLSocket:
    """A connection that accepts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection((endpoint.host, endpoint.port), timeout=watch.DEADLINE))


def trusted(endpoint: Endpoint) -> ssl.SSLSocket:
    """A connection that has shown the token."""
    connection = stranger(endpoint)
    connection.sendall(endpoint.token)
    return connection


def refused(connection: socket.socket) -> bool:
    """Whether the other side ends the connection."""
    try:
        return connection.recv(1) == b""
    except OSError:
        return True


def answer(connection: socket.socket) -> messages.Message | None:
    """What the driver answers; ``None`` if it ends the connection instead."""
    try:
        return connections.read(connection)
    except TimeoutError:
        raise
    except OSError:
        return None
