"""Connect each rank of a node to MPI, although MPI does not start the ranks.

MPI starts a small process, a *shim*, instead of each rank; see :mod:`distributor.launch.mpi.node`. MPI gives the shim a
*place*: the environment variables and, with MPICH, the socket that a process needs to join MPI as a certain rank. The
shim passes its place on to the rank.

Messages between a rank and MPICH's process manager pass through this process, the node's companion (which runs MPI
there). The companion does not report to the manager that a rank has ended, because the launcher decides whether a rank
has failed. The companion does not pass on ``MPI_Abort`` either, because MPICH's manager would then end the other ranks
itself. Instead, the rank that calls ``MPI_Abort`` ends, and the launcher stops the others, as after any failure.

MPI starts a shim instead of each process that ranks spawn (``MPI_Comm_spawn``), too. This shim starts the process
itself, and stays until the process has ended. If the process fails, the companion ends with an error.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributor.channel import control
from distributor.launch.mpi import pmi, segments
from distributor.machine import folders, processes, shared_memory

#: Maximum number of bytes of a rank's place (the variables that MPI sets for it), and of a message that is passed on.
_MOST = 1 << 16

#: Number of seconds between the end of a process of MPI and the error that reports this end. If the end of a rank was
#: the cause, the rank's own error, which explains more, comes first.
PATIENCE = 1.0

#: Number of seconds between looks at the shared memory of processes that ranks have spawned.
_LOOK = 0.5

#: A function that is called with an error text if a process ends too early, and with the number of seconds in which the
#: end of a rank may turn out to be the cause.
Fail = Callable[[str, float], None]


class Places:
    """Passes each rank of a node its *place*: what the rank needs to join MPI (variables and, with MPICH, a socket).

    MPI gives the variables and the socket to a *shim*, a process that MPI starts instead of the rank. The shim sends
    them to this process, the node's companion (which runs MPI there), and the companion sends them to the rank.

    Args:
        line: name of the socket to which ranks and shims (the processes that MPI starts instead of others) connect.
        size: number of the node's ranks.
        folder: the node's private folder.
        fail: called when a shim ends, even if all ranks have already ended, and when a process that ranks have spawned
            fails.
    """

    def __init__(self, line: str, size: int, folder: str, fail: Fail) -> None:
        self._size = size
        self._folder = folder
        self._fail = fail
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{line}")
        self._listener.listen(2 * size)
        self._shims: list[tuple[Mapping[str, str], socket.socket | None, socket.socket]] = []
        self._watched = selectors.DefaultSelector()
        self._ended = 0
        self._spawned: dict[socket.socket, _Spawned] = {}
        self._segments: set[str] = set()
        self._waiting: list[socket.socket] = []

    @property
    def over(self) -> bool:
        """Whether all ranks of the node have ended."""
        return self._ended == self._size

    @property
    def full(self) -> bool:
        """Whether there is a place for each rank of the node."""
        return len(self._shims) == self._size

    def give(self, ready: Callable[[], None]) -> None:
        """Get from shims what ranks need to join MPI, and give it to the ranks. Never returns.

        A *shim* is a process that MPI starts instead of a rank. A *place* is what a rank needs to join MPI: environment
        variables and, with MPICH, a socket. Once the places of all ranks of this node have arrived, send each rank its
        place when the rank asks for it.

        Args:
            ready: called once each shim has sent the place of its rank.
        """
        while not self.full:
            shim = self._accept()
            told, descriptors, _, _ = socket.recv_fds(shim, _MOST, 1)
            if told.startswith(b"{"):
                manager = socket.socket(fileno=descriptors[0]) if descriptors else None
                self._shims.append((json.loads(told), manager, shim))
                self._watch(shim, self._on_shims_end)
        self._shims.sort(key=lambda shim: rank_of(shim[0]))
        ready()
        self._watch(self._listener, lambda _: self._answer(self._accept()))
        while True:
            events = self._watched.select(_LOOK if self._spawned else None)
            for key, _ in events:
                key.data(key.fileobj)
            if not events:
                self._note()

    def _watch(self, connection: socket.socket, then: Callable[[Any], None]) -> None:
        self._watched.register(connection, selectors.EVENT_READ, then)

    def _on_shims_end(self, shim: socket.socket) -> None:
        self._watched.unregister(shim)
        self._fail(
            "the process that MPI had started in place of a rank has ended, so the rank has lost its connection to MPI",
            PATIENCE,
        )

    def _answer(self, asking: socket.socket) -> None:
        """Answer a rank, or the shim of a process that ranks spawn."""
        asked, descriptors, _, _ = socket.recv_fds(asking, _MOST, 1)
        if asked.isdigit():
            place, manager, _ = self._shims[int(asked)]
            self._watch(asking, self._on_ranks_end)
            self._give(asking, json.dumps(place).encode(), manager, asking.send)
        elif asked.startswith(b"["):
            pid, command = json.loads(asked)
            manager = socket.socket(fileno=descriptors[0]) if descriptors else None
            self._spawned[asking] = _Spawned(pid, manager)
            self._watch(asking, partial(self._on_spawned, command=command))
            self._give(asking, b"-", manager, lambda code: self._miss(command, f"called MPI_Abort({code.decode()})"))
        elif asked == b"wait":
            self._waiting.append(asking)
            self._release()

    def _give(
        self, asking: socket.socket, told: bytes, manager: socket.socket | None, on_abort: Callable[[bytes], object]
    ) -> None:
        """Send a process a message and, with MPICH, a line that leads to MPICH's manager through this process."""
        if manager is None:
            asking.send(told)
            return
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(asking, [told], [theirs.fileno()])
        relay = _Relay(ours, manager, on_abort, self._watched.unregister)
        self._watch(ours, lambda _: relay.to_manager())
        self._watch(manager, lambda _: relay.to_process())

    def _on_spawned(self, shim: socket.socket, command: str) -> None:
        """Note how a process that ranks have spawned has ended, which its shim says at its own end."""
        code = _received(shim)
        if code != b"0":
            self._miss(command, ending(int(code)) if code else "was lost")
        self._watched.unregister(shim)
        shim.close()
        manager = self._spawned.pop(shim).manager
        if manager is not None:
            with suppress(OSError):  # the manager has ended
                manager.shutdown(socket.SHUT_WR)
        self._release()

    def _miss(self, command: str, how: str) -> None:
        """Report that a process that ranks have spawned has failed."""
        self._note()
        self._fail(f"a process that MPI_Comm_spawn had started {how}: {command}", 0.0)

    def _note(self) -> None:
        """Note the shared memory of the processes that ranks have spawned, so that it goes with the node's folder."""
        new = segments.mapped(pid for each in self._spawned.values() for pid in processes.children(each.pid))
        if not new <= self._segments:
            self._segments |= new
            folders.note_elsewhere(self._folder, [f"{shared_memory.FOLDER}/{name}" for name in sorted(self._segments)])

    def _release(self) -> None:
        """Let ranks end that wait for the processes that ranks have spawned."""
        while self._waiting and not self._spawned:
            self._waiting.pop().close()

    def _on_ranks_end(self, rank: socket.socket) -> None:
        self._watched.unregister(rank)
        rank.close()
        self._ended += 1

    def _accept(self) -> socket.socket:
        """Return the next connection of this user. Close connections of other users, who may find the socket's name."""
        while True:
            connection, _ = self._listener.accept()
            if control.peer_user(connection) == os.getuid():
                return connection
            connection.close()


@dataclass(frozen=True)
class _Spawned:
    """A process that ranks have spawned: the pid of its shim and, with MPICH, the line to the manager."""

    pid: int
    manager: socket.socket | None


class _Relay:
    """Passes messages between a process and MPICH's manager.

    Args:
        ours: the line to the process.
        manager: the line to the manager.
        on_abort: called with the exit code that the process passes to ``MPI_Abort``.
        forget: called with a line on which nothing more comes.
    """

    def __init__(
        self,
        ours: socket.socket,
        manager: socket.socket,
        on_abort: Callable[[bytes], object],
        forget: Callable[[socket.socket], object],
    ) -> None:
        self._ours = ours
        self._manager = manager
        self._on_abort = on_abort
        self._forget = forget
        self._begun = b""

    def to_manager(self) -> None:
        """Pass a message of the process on, answer it, or keep it until the rest of it has come."""
        said = _received(self._ours)
        message, self._begun = self._begun + said, b""
        if not said:
            self._forget(self._ours)
        elif (code := pmi.aborts(message)) is not None:
            self._on_abort(code)
        elif pmi.asks_for_topology(message):
            _send(self._ours, b"cmd=get_result rc=1\n")
        elif not pmi.spawns(message):
            _send(self._manager, message)
        elif pmi.is_whole(message):
            _send(self._manager, pmi.through_shims(message))
        else:
            self._begun = message

    def to_process(self) -> None:
        """Pass a message of the manager on."""
        if said := _received(self._manager):
            _send(self._ours, said)
        else:
            self._forget(self._manager)


def ending(code: int) -> str:
    """Return how a process has ended with an exit code, which is negative if a signal has ended the process.

    >>> ending(3), ending(-9)
    ('ended with code 3', 'was killed by SIGKILL')
    """
    return f"was killed by {processes.signal_name(-code)}" if code < 0 else f"ended with code {code}"


def rank_of(place: Mapping[str, str]) -> int:
    """Return the rank for which MPI has set the environment variables in ``place``.

    >>> rank_of({"PMI_RANK": "3"}), rank_of({"OMPI_COMM_WORLD_RANK": "4"})
    (3, 4)
    """
    return int(place.get("PMI_RANK") or place["OMPI_COMM_WORLD_RANK"])


def _received(connection: socket.socket) -> bytes:
    """Return the bytes that have arrived on a connection; no bytes if the process at its other end has ended."""
    try:
        return connection.recv(_MOST)
    except OSError:
        return b""


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:  # the other side has ended, which is noticed elsewhere
        return
