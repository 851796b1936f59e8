"""Connect each rank of a node to MPI, although MPI does not start the ranks.

MPI starts a small process, a *shim*, instead of each rank; see :mod:`distributor.mpi.node`. MPI gives the shim a
*place*: the environment variables and, with MPICH, the socket that a process needs to join MPI as a certain rank. The
shim passes its place on to the rank.

Messages between a rank and MPICH's process manager pass through this process, the node's companion (which runs MPI
there). The companion does not report to the manager that a rank has ended, because the launcher decides whether a rank
has failed. The companion does not pass on ``MPI_Abort`` either, because MPICH's manager would then end the other ranks
itself. Instead, the rank that calls ``MPI_Abort`` ends, and the launcher stops the others, as after any failure.

Source: the PMI-1 protocol, lines such as ``cmd=abort exitcode=7``; ``src/pmi/src/pmi_wire.c`` of MPICH.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from distributor.channel import control

#: Maximum number of bytes of a rank's place (the variables that MPI sets for it), and of a message that is passed on.
_MOST = 1 << 16

_ABORT = re.compile(rb"cmd=abort\b[^\n]*\bexitcode=(-?\d+)")

#: A rank's request for a file that describes the machine. This process answers that there is none, and the rank then
#: looks at the machine itself. MPICH's daemon would create such a file in /tmp, and leave it behind if the daemon is
#: killed.
_TOPOLOGY = b"key=PMI_hwloc_xmlfile"

#: A function that is called with an error text if MPI ends too early.
Fail = Callable[[str], None]


class Places:
    """Passes each rank of a node its *place*: what the rank needs to join MPI (variables and, with MPICH, a socket).

    MPI gives the variables and the socket to a *shim*, a process that MPI starts instead of the rank. The shim sends
    them to this process, the node's companion (which runs MPI there), and the companion sends them to the rank.

    Args:
        line: name of the socket to which both ranks and shims (the processes that MPI starts instead of ranks) connect.
        size: number of the node's ranks.
        fail: called with an error text when a shim ends, even if all ranks have already ended.
    """

    def __init__(self, line: str, size: int, fail: Fail) -> None:
        self._size = size
        self._fail = fail
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{line}")
        self._listener.listen(2 * size)
        self._shims: list[tuple[Mapping[str, str], socket.socket | None, socket.socket]] = []
        self._watched = selectors.DefaultSelector()
        self._ended = 0

    @property
    def over(self) -> bool:
        """Whether all ranks of the node have ended."""
        return self._ended == self._size

    def give(self, ready: Callable[[], None]) -> None:
        """Get from shims what ranks need to join MPI, and give it to the ranks. Never returns.

        A *shim* is a process that MPI starts instead of a rank. A *place* is what a rank needs to join MPI: environment
        variables and, with MPICH, a socket. Once the places of all ranks of this node have arrived, send each rank its
        place when the rank asks for it.

        Args:
            ready: called once each shim has sent the place of its rank.
        """
        while len(self._shims) < self._size:
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
            for key, _ in self._watched.select():
                key.data(key.fileobj)

    def _watch(self, connection: socket.socket, then: Callable[[Any], None]) -> None:
        self._watched.register(connection, selectors.EVENT_READ, then)

    def _on_shims_end(self, shim: socket.socket) -> None:
        self._watched.unregister(shim)
        self._fail(
            "the process that MPI had started in place of a rank has ended, so the rank has lost its connection to MPI"
        )

    def _answer(self, rank: socket.socket) -> None:
        """Send a rank the variables, and with MPICH the socket, that connect it to MPI."""
        asked = rank.recv(_MOST)
        if not asked.isdigit():
            return
        place, manager, _ = self._shims[int(asked)]
        self._watch(rank, self._on_ranks_end)
        if manager is None:
            rank.send(json.dumps(place).encode())
            return
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(rank, [json.dumps(place).encode()], [theirs.fileno()])
        self._watch(ours, partial(self._to_manager, manager=manager, rank=rank))
        self._watch(manager, partial(self._to_rank, ours=ours))

    def _to_manager(self, ours: socket.socket, manager: socket.socket, rank: socket.socket) -> None:
        said = _received(ours)
        if (abort := _ABORT.search(said)) is not None:
            rank.send(abort[1])
        elif _TOPOLOGY in said:
            _send(ours, b"cmd=get_result rc=1\n")
        elif said:
            _send(manager, said)
        else:
            self._watched.unregister(ours)

    def _to_rank(self, manager: socket.socket, ours: socket.socket) -> None:
        if said := _received(manager):
            _send(ours, said)
        else:
            self._watched.unregister(manager)

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
