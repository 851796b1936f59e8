"""Send the commands that start MPI's daemons from node 0's companion to those of the other nodes.

Both sides first prove that they have the run's key: each answers random bytes of the other with their HMAC.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from distributor.machine import network

_MOST = 1 << 16  # bytes of a command


def tell(listener: socket.socket, key: bytes, lines: Sequence[str]) -> None:
    """Answer each node that asks with its line: the MPI to use, and the command of its daemon. Never returns."""
    while True:
        accepted, _ = listener.accept()
        connection = Connection(accepted.detach())
        threading.Thread(target=_answer, args=(connection, key, lines), daemon=True).start()


def _answer(connection: Connection, key: bytes, lines: Sequence[str]) -> None:
    with connection, contextlib.suppress(Exception):  # the client does not have the key, or has ended
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        connection.send_bytes(lines[int(connection.recv_bytes(_MOST))].encode())


def ask(head: tuple[str, int], key: bytes, node: int) -> str:
    """Ask node 0 for this node's line, and wait for it."""
    with Connection(network.connect_once_up(head).detach()) as connection:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(str(node).encode())
        return connection.recv_bytes(_MOST).decode()
