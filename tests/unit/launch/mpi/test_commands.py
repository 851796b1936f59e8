"""Which companion of MPI is told what to start."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError

import pytest

from distributor.launch.mpi import commands

KEY = b"the run's"


@pytest.fixture
def head() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=commands.tell, args=(listener, KEY, ["zero", "one"]), daemon=True).start()
        yield listener.getsockname()


def test_each_node_is_told_its_own_command(head: tuple[str, int]) -> None:
    assert [commands.ask(head, KEY, node) for node in (1, 0)] == ["one", "zero"]


def test_commands_are_sent_only_to_owners_of_the_key(head: tuple[str, int]) -> None:
    with pytest.raises(AuthenticationError):
        commands.ask(head, b"a stranger's", 1)


def test_unauthenticated_connections_delay_no_node(head: tuple[str, int]) -> None:
    with socket.create_connection(head), socket.create_connection(head) as other:
        other.sendall(b"\xff" * 100)
        assert commands.ask(head, KEY, 1) == "one"


def test_a_node_waits_for_node_0() -> None:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
        told: list[str] = []
        asking = threading.Thread(target=lambda: told.append(commands.ask(address, KEY, 0)), daemon=True)
        asking.start()
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            threading.Thread(target=commands.tell, args=(listener, KEY, ["zero"]), daemon=True).start()
            asking.join(60.0)
    assert told == ["zero"]
