"""Starts launchers and gives them their orders.

A launcher is a new interpreter, which first imports torch, or a fork of a process that has imported it. A fork waits
for its order on a socket pair, its *line* to the agent. The first launcher is a fork if its agent is one of a warm
process.

If there may be further attempts and ``start_method="fork"``, each launcher first of all forks a spare, before it has
run user code or has threads. When the launcher ends, the agent becomes the spare's parent. Without a living spare, the
next launcher is a new interpreter.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from distributor.machine import bootstrap, processes
from distributor.values import layout, messages
from distributor.values.placement import Share
from distributor.values.plan import NodeOrder

_SPARE_PATIENCE = 5.0  # seconds for the pid of a spare, which it sends as soon as it is forked

#: Maximum number of bytes of a message to or from a waiting launcher: the path of its order, or its pid.
_LONGEST = 1 << 14

_OTHER_FILES = 96  # files besides those for ranks and for the store

#: Maximum number of descriptors of an order: the pipe for events, the slots, the store's socket, the spare's line.
_MOST_DESCRIPTORS = 4


class Launcher(Protocol):
    """A launcher as the agent sees it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; ``None`` until the end is noticed, as by :meth:`wait`."""

    def start(self, order: NodeOrder, slots: int, store: socket.socket | None, *, spare: bool) -> int:
        """Make the launcher start the ranks, and return the pipe of its events, which closes when it ends.

        ``slots`` is the memory in which ranks report their ends, ``store`` the listening socket of the rendezvous store
        on node 0. If ``spare``, the launcher forks a spare.
        """

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> object:
        """Block until the launcher has ended."""

    def successor(self) -> Launcher:
        """Return the launcher of the next attempt, once this one has ended: its spare, or a new process."""


@dataclass(frozen=True)
class _Ends:
    """The connections between an agent and its launcher."""

    events: int  # the agent's end of the pipe
    spare: socket.socket | None  # the agent's end of the spare's line
    theirs: Mapping[str, int]  # what the launcher gets; "store" on node 0 only, "spare" if it forks one


def _open(slots: int, store: socket.socket | None, spare: bool) -> _Ends:
    events, event = os.pipe()
    theirs = {"event": event, "slots": os.dup(slots)}
    if store is not None:
        theirs["store"] = os.dup(store.fileno())
    if not spare:
        return _Ends(events, None, theirs)
    ours, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return _Ends(events, ours, {**theirs, "spare": line.detach()})


class SpawnedLauncher:
    """A launcher in a new process, which takes seconds to import torch."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._spare: socket.socket | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    def start(self, order: NodeOrder, slots: int, store: socket.socket | None, *, spare: bool) -> int:
        ends = _open(slots, store, spare)
        self._spare = ends.spare
        try:
            path = _write(_with(order, ends.theirs))
            with open(layout.launcher_log(order.folder), "wb") as log:
                self._process = subprocess.Popen(
                    bootstrap.command(order.root, "launcher", path, str(os.getpid())),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(order.environ),
                    pass_fds=list(ends.theirs.values()),
                )
        finally:
            for descriptor in ends.theirs.values():
                os.close(descriptor)
        return ends.events

    def send_signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> object:
        return self._process.wait() if self._process is not None else None

    def successor(self) -> Launcher:
        return _successor(self._spare)


class WaitingLauncher:
    """A forked launcher, a child of this process. It ends if its line closes before its order has come."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self._line = line
        self._spare: socket.socket | None = None
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        return self._returncode

    @property
    def is_waiting(self) -> bool:
        """Whether the launcher still waits: when it ends, the agent's end of the line becomes readable."""
        return not processes.readable([self._line.fileno()], 0)

    def start(self, order: NodeOrder, slots: int, store: socket.socket | None, *, spare: bool) -> int:
        ends = _open(slots, store, spare)
        self._spare = ends.spare
        message = messages.StartRanks(_write(order), tuple(ends.theirs))
        with self._line, suppress(OSError):  # the launcher was killed, so the pipe for events closes
            socket.send_fds(self._line, [json.dumps(messages.encode(message)).encode()], list(ends.theirs.values()))
        for descriptor in ends.theirs.values():
            os.close(descriptor)
        return ends.events

    def send_signal(self, number: int) -> None:
        if self._returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> object:
        if self._returncode is None:
            self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._returncode

    def successor(self) -> Launcher:
        return _successor(self._spare)


def _successor(line: socket.socket | None) -> Launcher:
    """Return the spare at the other end, or a launcher in a new process if there is none or it has ended."""
    if line is None:
        return SpawnedLauncher()
    line.settimeout(_SPARE_PATIENCE)
    with suppress(OSError):
        if said := line.recv(_LONGEST):
            return living(WaitingLauncher(int(said), line))
    line.close()
    return SpawnedLauncher()


def living(launcher: Launcher) -> Launcher:
    """Return the launcher, or a new one if it has ended while it waited for its order."""
    return launcher if not isinstance(launcher, WaitingLauncher) or launcher.is_waiting else SpawnedLauncher()


def files_needed(placement: Share) -> int:
    """Return how many files a node's launcher may have open: a process descriptor for each rank, and others.

    On the first node these include a connection to the store for every launcher and every rank of the run.
    """
    node = placement.node
    connections = placement.world_size + placement.count if node.node_rank == 0 else 0
    return node.local_world_size + connections + _OTHER_FILES


def fork(sockets: Mapping[str, socket.socket], owner: int) -> WaitingLauncher:
    """Fork the first launcher from this process, which must have imported torch and must have no threads.

    It closes ``sockets``, which are the agent's.
    """
    agent = os.getpid()
    ours, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        for inherited in (ours, *sockets.values()):
            inherited.close()
        _become_launcher(line, agent, owner)
    line.close()
    return WaitingLauncher(pid, ours)


def _become_launcher(line: socket.socket, agent: int, owner: int) -> NoReturn:
    """Wait for the order in this fork, then run the ranks; end if the agent ends before."""
    try:
        processes.die_with_parent(agent)
        order = await_order(line)
        if order is not None:
            from distributor.node import launcher

            launcher.become(order, agent, owner)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def await_order(line: socket.socket) -> NodeOrder | None:
    """Return the agent's order; ``None`` if the agent has ended."""
    with line:
        data, descriptors, _, _ = socket.recv_fds(line, _LONGEST, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    message = messages.decode(json.loads(data))
    assert isinstance(message, messages.StartRanks)
    return _with(read(message.path), dict(zip(message.names, descriptors)))


def read(path: str) -> NodeOrder:
    """Read the launcher's order, and remove its file unless ranks are new processes, which read it too."""
    with open(path, "rb") as file:
        order: NodeOrder = pickle.load(file)
    if order.start_method == "fork":
        os.unlink(path)  # otherwise ranks are new processes, which read the file too
    return order


def _with(order: NodeOrder, descriptors: Mapping[str, int]) -> NodeOrder:
    return replace(
        order,
        event_fd=descriptors["event"],
        store_fd=descriptors.get("store"),
        spare_fd=descriptors.get("spare"),
        slots_fd=descriptors["slots"],
    )


def _write(order: NodeOrder) -> str:
    """Write the order to a file, since it may hold a script that is too large for a message."""
    path = str(layout.order(order.folder))
    with open(path, "wb") as file:
        pickle.dump(order, file)
    return path
