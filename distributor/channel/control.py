"""The private connection (control line) between an agent and its owner, the process that started the agent.

The owner is the Python worker of a Spark task or, in local mode, the driver. The control line between agent and owner
is a socket pair. The agent inherits one end, and no other process can reach the line. The line carries pickles of plain
values, each preceded by its length. When the agent or the owner ends, the line closes, and the other process notices
this.

On Spark, this module also runs in Python workers where ``distributor`` is not installed. It therefore imports nothing
but the standard library.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

#: What a warm process (a process that has imported torch, and forks agents on request) answers if it must be replaced,
#: for example because a module that it has loaded has changed.
OUTDATED = b"outdated"


#: The start of what a warm process (a process that has imported torch, and forks agents on request) answers if it must
#: not be forked, for example because a module has started threads. The reason follows.
UNFIT = b"unfit "


def peer_user(connection: socket.socket) -> int:
    """Return the id of the user whose process is at the other end of a Unix socket (unix(7), SO_PEERCRED)."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def send(sock: socket.socket, message: Any) -> None:
    """Send one message over a socket, as a pickle."""
    data = pickle.dumps(message, protocol=5)
    sock.sendall(struct.pack("!Q", len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> Any:
    """Receive one message over a socket; return ``None`` when the process at the other end is gone."""
    header = _read_exactly(sock, 8)
    if header is None:
        return None
    data = _read_exactly(sock, struct.unpack("!Q", header)[0])
    return None if data is None else pickle.loads(data)


def _read_exactly(sock: socket.socket, size: int) -> bytearray | None:
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        try:
            count = sock.recv_into(view[filled:])
        except ConnectionError:
            return None
        if count == 0:
            return None
        filled += count
    return buffer
