"""Send the commands that start MPI's daemons from the companion of node 0 to the companions of the other nodes.

Both sides first prove to each other that they have the run's key.

Source: ``multiprocessing.connection``, where each side answers a challenge with its HMAC.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from distributor.machine import network

#: Maximum number of bytes of a command.
_MOST = 1 << 16


def tell(listener: socket.socket, key: bytes, lines: Sequence[str]) -> None:
    """Send each node its line when the node asks for it. Never returns.

    Args:
        listener: where nodes connect.
        key: the run's key; a client without it gets no answer.
        lines: a line for each node: the MPI to use, and the command of the node's daemon.
    """
    while True:
        accepted, _ = listener.accept()
        connection = Connection(accepted.detach())
        threading.Thread(target=_answer, args=(connection, key, lines), daemon=True).start()


def _answer(connection: Connection, key: bytes, lines: Sequence[str]) -> None:
    with connection, contextlib.suppress(Exception):  # a stranger, or a node that has ended
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        connection.send_bytes(lines[int(connection.recv_bytes(_MOST))].encode())


def ask(head: tuple[str, int], key: bytes, node: int) -> str:
    """Wait until node 0 answers, and return the line for a node, as :func:`tell` sends it.

    Args:
        head: where node 0 listens.
        key: the run's key.
        node: the number of the node.
    """
    with Connection(network.connect_once_up(head).detach()) as connection:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(str(node).encode())
        return connection.recv_bytes(_MOST).decode()
