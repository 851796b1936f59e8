"""The *control line* between an agent and its owner, the Python worker or driver that started it.

A socket pair of which the agent inherits one end: no other process can reach it, and either end notices the other's
exit. Python workers without ``distributor`` run this module too.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

from distributor.channel.connections import fill

#: A warm process that must be replaced answers this, for example because a module that it has loaded has changed.
OUTDATED = b"outdated"


#: A warm process that must not be forked answers this and a reason, for example that a module has started threads.
UNFIT = b"unfit "


def peer_user(connection: socket.socket) -> int:
    """Return the id of the user whose process is at the other end of a Unix socket (unix(7), SO_PEERCRED)."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def send(sock: socket.socket, message: Any) -> None:
    """Send a message as its length and its pickle."""
    data = pickle.dumps(message, protocol=5)
    sock.sendall(struct.pack("!Q", len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> Any:
    """Receive one message; ``None`` when the other process is gone."""
    try:
        fill(sock, memoryview(header := bytearray(8)))
        fill(sock, memoryview(data := bytearray(struct.unpack("!Q", header)[0])))
    except ConnectionError:
        return None
    return pickle.loads(data)
