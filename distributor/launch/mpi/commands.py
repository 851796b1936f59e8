"""Send the commands that start MPI's daemons from node 0 to the other nodes.

A node's *companion* is the process that runs MPI there. For each node, MPI's process manager gives the companion of
node 0 a command that starts MPI's daemon on that node. The companions of the other nodes ask the companion of node 0
for their nodes' commands, and run them. With Open MPI, some nodes have no daemon, and get no command.

Before a command is sent, sender and receiver prove to each other that they have the run's key, with functions of
``multiprocessing.connection``: each side sends random bytes, and the other side answers with the HMAC of these bytes.
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
    """Answer each node that asks: send the line of text with which the node starts MPI. Never returns.

    Args:
        listener: the socket to which nodes connect.
        key: the run's key; a client without this key gets no answer.
        lines: a line for each node, with the MPI to use and the command that starts the node's daemon.
    """
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
    """Ask node 0 for the text with which a node starts MPI, wait for the text, and return it; see :func:`tell`.

    Args:
        head: the host and port at which node 0 listens.
        key: the run's key, by which this process and node 0 recognize each other.
        node: the number of the node that asks.
    """
    with Connection(network.connect_once_up(head).detach()) as connection:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(str(node).encode())
        return connection.recv_bytes(_MOST).decode()
