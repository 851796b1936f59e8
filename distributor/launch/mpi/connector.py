"""Gives the ranks of a node their places, and passes messages between them and MPICH's process manager.

The manager hears of no rank's end and of no ``MPI_Abort``: it would end the other ranks itself, but whether a rank has
failed is the launcher's decision. The rank that calls ``MPI_Abort`` ends.

The shim of a process that ranks spawn (``MPI_Comm_spawn``) starts this process, and stays until it has ended. If the
process fails, so does the companion.
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

_MOST = 1 << 16  # bytes of a place, and of a message that is passed on

#: Seconds before the end of a process of MPI is reported. If a rank's end was the cause, its own error comes first.
PATIENCE = 1.0

_LOOK = 0.5  # seconds between looks at the shared memory of spawned processes

#: Called with an error text if a process ends too early, and with the seconds to wait for the end of a rank.
Fail = Callable[[str, float], None]


class Places:
    """The places of a node's ranks. ``line`` names the socket to which ranks and shims connect."""

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
        """Collect the ranks' places, call ``ready``, and give each rank its own when it asks. Never returns."""
        while not self.full:
            shim = self._accept()
            message, descriptors, _, _ = socket.recv_fds(shim, _MOST, 1)
            if message.startswith(b"{"):
                manager = socket.socket(fileno=descriptors[0]) if descriptors else None
                self._shims.append((json.loads(message), manager, shim))
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
        """Answer a rank, the shim of a spawned process, or a rank that waits for spawned processes."""
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
        self, asking: socket.socket, message: bytes, manager: socket.socket | None, on_abort: Callable[[bytes], object]
    ) -> None:
        """Send a message and, with MPICH, a line that leads to MPICH's manager through this process."""
        if manager is None:
            asking.send(message)
            return
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(asking, [message], [theirs.fileno()])
        relay = _Relay(ours, manager, on_abort, self._watched.unregister)
        self._watch(ours, lambda _: relay.to_manager())
        self._watch(manager, lambda _: relay.to_process())

    def _on_spawned(self, shim: socket.socket, command: str) -> None:
        """Note how a spawned process has ended, which its shim says at its own end."""
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
        """Report that a spawned process has failed."""
        self._note()
        self._fail(f"a process that MPI_Comm_spawn had started {how}: {command}", 0.0)

    def _note(self) -> None:
        """Note the shared memory of spawned processes, so that it goes with the node's folder."""
        new = segments.mapped(pid for process in self._spawned.values() for pid in processes.children(process.pid))
        if not new <= self._segments:
            self._segments |= new
            folders.note_elsewhere(self._folder, [f"{shared_memory.FOLDER}/{name}" for name in sorted(self._segments)])

    def _release(self) -> None:
        """Let ranks end that wait for spawned processes."""
        while self._waiting and not self._spawned:
            self._waiting.pop().close()

    def _on_ranks_end(self, rank: socket.socket) -> None:
        self._watched.unregister(rank)
        rank.close()
        self._ended += 1

    def _accept(self) -> socket.socket:
        """Return the next connection of this user; others may find the socket's name."""
        while True:
            connection, _ = self._listener.accept()
            if control.peer_user(connection) == os.getuid():
                return connection
            connection.close()


@dataclass(frozen=True)
class _Spawned:
    """A process that ranks have spawned."""

    pid: int  # of its shim
    manager: socket.socket | None  # with MPICH, the line to its manager


class _Relay:
    """Passes messages between a process and MPICH's manager; ``forget`` gets a line on which nothing more comes."""

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
        """Pass a message of the process on, answer it, or keep it until its rest has come."""
        received = _received(self._ours)
        message, self._begun = self._begun + received, b""
        if not received:
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
        if message := _received(self._manager):
            _send(self._ours, message)
        else:
            self._forget(self._manager)


def ending(code: int) -> str:
    """Return how a process has ended; a negative code is a signal's.

    >>> ending(3), ending(-9)
    ('ended with code 3', 'was killed by SIGKILL')
    """
    return f"was killed by {processes.signal_name(-code)}" if code < 0 else f"ended with code {code}"


def rank_of(place: Mapping[str, str]) -> int:
    """Return the rank of a place.

    >>> rank_of({"PMI_RANK": "3"}), rank_of({"OMPI_COMM_WORLD_RANK": "4"})
    (3, 4)
    """
    return int(place.get("PMI_RANK") or place["OMPI_COMM_WORLD_RANK"])


def _received(connection: socket.socket) -> bytes:
    """Return the bytes that have arrived; none if the process at the other end has ended."""
    try:
        return connection.recv(_MOST)
    except OSError:
        return b""


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:  # the other side has ended, which is noticed elsewhere
        return
