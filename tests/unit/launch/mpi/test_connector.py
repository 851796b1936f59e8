"""Places of ranks, and the messages between processes and MPICH's manager."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distributor.launch.mpi.connector import PATIENCE, Places
from distributor.launch.mpi.programs import SHIM

DEADLINE = 60.0


class Shim:
    """Stands for a shim, and for MPICH's process manager behind it."""

    def __init__(self, line: str, number: int) -> None:
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(f"\0{line}")
        self.manager, theirs = socket.socketpair()
        with theirs:
            place = {"PMI_RANK": str(number), "PMI_FD": "9"}
            socket.send_fds(self.line, [json.dumps(place).encode()], [theirs.fileno()])


def ask(line: str, local_rank: int) -> tuple[socket.socket, dict[str, str], socket.socket]:
    """What a rank gets: the line to its companion, its place, and its line to the manager."""
    companion = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    companion.settimeout(DEADLINE)
    companion.connect(f"\0{line}")
    companion.send(str(local_rank).encode())
    told, (descriptor, *_), _, _ = socket.recv_fds(companion, 1 << 16, 1)
    return companion, json.loads(told), socket.socket(fileno=descriptor)


def test_ranks_get_places_by_number_and_speak_to_their_managers() -> None:
    line, ready = f"test-{secrets.token_hex(8)}", threading.Event()
    failures: list[tuple[str, float]] = []
    places = Places(line, 2, "", lambda *failure: failures.append(failure))
    threading.Thread(target=places.give, args=(ready.set,), daemon=True).start()
    late, early = Shim(line, 5), Shim(line, 4)
    assert ready.wait(DEADLINE)
    companion, place, pmi = ask(line, 0)
    assert place["PMI_RANK"] == "4"
    pmi.sendall(b"cmd=init\n")
    assert early.manager.recv(100) == b"cmd=init\n"
    early.manager.sendall(b"cmd=response\n")
    assert pmi.recv(100) == b"cmd=response\n"
    pmi.sendall(b"cmd=abort exitcode=7 message=no\n")
    assert companion.recv(100) == b"7"
    for connection in (companion, pmi):
        connection.close()
    other, place, pmi = ask(line, 1)  # the first one's end has been seen, and its manager has not heard of it
    assert place["PMI_RANK"] == "5"
    early.manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        early.manager.recv(100)
    assert not places.over
    late.line.close()
    while not failures:
        pass
    assert failures == [
        (
            "the process that MPI had started in place of a rank has ended, so the rank has lost its connection to MPI",
            PATIENCE,
        )
    ]
    for each in (other, pmi, early.line, early.manager, late.manager):
        each.close()
    while not places.over:
        pass


class Spawned(Shim):
    """Stands for the shim of a process that ranks spawn, for this process, and for MPICH's process manager behind it.

    Args:
        line: name of the companion's socket.
        command: the command of the process.
    """

    def __init__(self, line: str, command: str) -> None:
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(f"\0{line}")
        self.manager, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.line, [json.dumps([os.getpid(), command]).encode()], [theirs.fileno()])
        _, (descriptor, *_), _, _ = socket.recv_fds(self.line, 1, 1)
        self.process = socket.socket(fileno=descriptor)
        for each in (self.line, self.manager, self.process):
            each.settimeout(DEADLINE)


@pytest.fixture
def serving() -> Iterator[tuple[str, list[tuple[str, float]], Shim]]:
    """A companion with one rank: the name of its socket, what it reports, and the rank's shim."""
    line, ready = f"test-{secrets.token_hex(8)}", threading.Event()
    failures: list[tuple[str, float]] = []
    places = Places(line, 1, "", lambda *failure: failures.append(failure))
    threading.Thread(target=places.give, args=(ready.set,), daemon=True).start()
    rank_shim = Shim(line, 0)
    assert ready.wait(DEADLINE)
    yield line, failures, rank_shim


Serving = tuple[str, list[tuple[str, float]], Shim]


def test_a_rank_spawns_processes_through_shims(serving: Serving) -> None:
    line, _, shims = serving
    _, _, pmi = ask(line, 0)
    part = "mcmd=spawn\nnprocs=2\nexecname=%s\ntotspawns=2\nspawnssofar=%d\nargcnt=1\narg1=a b\ninfo_num=0\nendcmd\n"
    request = part.encode() % (b"one", 1) + part.encode() % (b"two", 2)
    pmi.sendall(request[:30])
    for _ in range(2):  # after the second answer, the first bytes have been read
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(f"\0{line}")
            other.send(b"wait")
            assert other.recv(1) == b""
    pmi.sendall(request[30:])
    told = b""
    while told.count(b"endcmd\n") < 2:
        told += shims.manager.recv(1 << 16)
    sh = "\n".join(f"arg{number}={word}" for number, word in enumerate([*SHIM[1:], "."], 1))
    for number, name in ((1, "one"), (2, "two")):
        assert f"spawnssofar={number}\nargcnt=6\n{sh}\narg5={name}\narg1=a b\n" in told.decode()
    assert told.count(b"execname=/bin/sh\n") == 2


def test_a_spawned_process_speaks_to_its_manager_until_its_shim_ends(serving: Serving) -> None:
    line, failures, _ = serving
    spawned = Spawned(line, "work")
    spawned.process.sendall(b"cmd=init\n")
    assert spawned.manager.recv(100) == b"cmd=init\n"
    spawned.process.sendall(b"cmd=get kvsname=x key=PMI_hwloc_xmlfile\n")
    assert spawned.process.recv(100) == b"cmd=get_result rc=1\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank_at_its_end:
        rank_at_its_end.connect(f"\0{line}")
        rank_at_its_end.send(b"wait")
        spawned.process.close()
        spawned.manager.setblocking(False)
        with pytest.raises(BlockingIOError):  # the manager would kill the shim, which could not report a failure
            spawned.manager.recv(100)
        with pytest.raises(BlockingIOError):
            rank_at_its_end.recv(1, socket.MSG_DONTWAIT)
        spawned.line.send(b"0")
        spawned.manager.settimeout(DEADLINE)
        assert spawned.manager.recv(100) == b""
        rank_at_its_end.settimeout(DEADLINE)
        assert rank_at_its_end.recv(1) == b""
    assert failures == []


@pytest.mark.parametrize(
    ("fails", "how"),
    [
        (lambda spawned: spawned.line.send(b"3"), "ended with code 3"),
        (lambda spawned: spawned.line.send(b"-9"), "was killed by SIGKILL"),
        (lambda spawned: spawned.line.close(), "was lost"),
        (lambda spawned: spawned.process.sendall(b"cmd=abort exitcode=7\n"), "called MPI_Abort(7)"),
    ],
)
def test_a_spawned_process_that_fails_is_reported(serving: Serving, fails: Callable[[Spawned], Any], how: str) -> None:
    line, failures, _ = serving
    spawned = Spawned(line, "work hard")
    fails(spawned)
    while not failures:
        pass
    assert failures == [(f"a process that MPI_Comm_spawn had started {how}: work hard", 0.0)]


def test_places_of_open_mpi_need_no_line_to_a_manager() -> None:
    line, ready = f"test-{secrets.token_hex(8)}", threading.Event()
    threading.Thread(target=Places(line, 1, "", print).give, args=(ready.set,), daemon=True).start()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as shims,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as companion,
    ):
        shims.connect(f"\0{line}")
        shims.send(json.dumps({"OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "x"}).encode())
        assert ready.wait(DEADLINE)
        companion.connect(f"\0{line}")
        companion.send(b"0")
        assert json.loads(companion.recv(1 << 16))["PMIX_NAMESPACE"] == "x"
