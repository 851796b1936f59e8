"""Start launchers (the processes that start a node's ranks) and give them their orders.

A launcher is either a newly started Python interpreter, which must first import torch, or a fork of a process that has
imported torch. A forked launcher waits until the agent sends it an order that says which ranks to start. The order
comes over a socket pair, the launcher's *line* to the agent.

If the agent is a fork of a warm process (one that has imported torch in advance), the agent forks the first launcher.
Otherwise, the first launcher is a new interpreter. If the run may have further attempts, and ranks are forks of the
launcher (``start_method="fork"``), each launcher first of all forks a *spare* (the launcher of the next attempt). At
this moment, the launcher has run no user code and has no threads, so the spare can fork ranks later. When the launcher
ends, the agent becomes the parent of the spare. If there is no spare, or if it has ended by then, the next launcher is
a new interpreter.
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
from distributor.values.placement import Node, Placement
from distributor.values.plan import NodeOrder

#: Number of seconds for which an agent waits for the pid of a spare (the next attempt's launcher). A spare sends its
#: pid as soon as it is forked.
_SPARE_PATIENCE = 5.0

#: Maximum number of bytes of a message between an agent and a waiting launcher: the path of the launcher's order, or
#: the launcher's pid.
_LONGEST = 1 << 14

#: Number of files that a launcher opens in addition to the files for ranks and for the store.
_OTHER_FILES = 96

#: Maximum number of descriptors sent with an order: the pipe for events, the memory in which ranks report their ends,
#: the store's socket, and the socket on which a spare waits.
_MOST_DESCRIPTORS = 4


class Launcher(Protocol):
    """The interface through which an agent controls its launcher."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """The launcher's exit code, negative for a signal; ``None`` until its end is noticed, as by :meth:`wait`."""

    def start(self, order: NodeOrder, slots: int, store: socket.socket | None, *, spare: bool) -> int:
        """Make the launcher start the ranks.

        Args:
            order: which ranks to start, and how.
            slots: the descriptor of memory in which the ranks report to the agent how they end.
            store: on node 0, a listening socket for the rendezvous store; ``None`` on other nodes.
            spare: whether the launcher forks a spare, the launcher of the next attempt.

        Returns:
            The descriptor of a pipe on which the launcher reports events, such as the end of a rank. The pipe closes
            when the launcher ends.
        """

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> object:
        """Block until the launcher has ended."""

    def successor(self) -> Launcher:
        """Return the launcher of the next attempt: the spare that this launcher has forked, or else a new process.

        Call this once the current launcher has ended.
        """


@dataclass(frozen=True)
class _Ends:
    """The ends of the connections between an agent and its launcher.

    Attributes:
        events: the agent's end of the pipe on which the launcher reports events, such as the end of a rank.
        spare: the agent's end of a socket pair to the *spare* (the launcher of the next attempt). Over it, the agent
            later tells the spare which ranks to start. ``None`` if the launcher does not fork a spare.
        theirs: the descriptors that the launcher gets. Keys are ``"event"`` (the launcher's end of the pipe),
            ``"slots"`` (memory in which ranks report how they end), ``"store"`` (a listening socket for the rendezvous
            store, on node 0 only) and ``"spare"`` (the other end of the socket pair, if there is one).
    """

    events: int
    spare: socket.socket | None
    theirs: Mapping[str, int]


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
    """A launcher in a new process, which :meth:`start` starts. The process first imports torch, which takes seconds."""

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
    """A forked launcher that waits until the agent tells it which ranks to start. It is a child of this process.

    Args:
        pid: the launcher's pid.
        line: the agent's end of the socket pair on which the launcher waits. If this end closes before the agent has
            sent the order, the launcher ends.
    """

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
        """Whether the launcher has not ended and still waits for its order.

        If the launcher has ended, its end of the socket pair has closed, which makes the agent's end readable.
        """
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
    """Return the launcher of the next attempt: the forked one (*spare*) at the other end of a socket, or a new one.

    The spare is a fork of the earlier launcher, and waits until the agent tells it which ranks to start. If there is no
    spare, or if it has ended, return a launcher that will be started as a new process.
    """
    if line is None:
        return SpawnedLauncher()
    line.settimeout(_SPARE_PATIENCE)
    with suppress(OSError):
        if said := line.recv(_LONGEST):
            return living(WaitingLauncher(int(said), line))
    line.close()
    return SpawnedLauncher()


def living(launcher: Launcher) -> Launcher:
    """Return the given launcher, or a new one if the given one has ended while it waited for its order."""
    return launcher if not isinstance(launcher, WaitingLauncher) or launcher.is_waiting else SpawnedLauncher()


def files_needed(who: Placement, node: Node) -> int:
    """Return how many files a node's launcher may have open at a time.

    The launcher has one open file for each rank of the node (the process descriptor by which it watches the rank), some
    other files and, on the first node, the connections of the rendezvous store.

    Args:
        who: the placement, which gives the number of connections to the store. Every launcher and every rank of the run
            may connect to the store, and the first node's launcher needs a descriptor for each connection.
        node: the node on which the launcher runs.
    """
    connections = who.world_size + len(who.nodes) if node == who.master else 0
    return node.local_world_size + connections + _OTHER_FILES


def fork(sockets: Mapping[str, socket.socket], owner: int) -> WaitingLauncher:
    """Fork the first launcher from this process, which must have imported torch and must have no threads.

    Args:
        sockets: the sockets that the agent has inherited. The launcher keeps none of them.
        owner: pid of the process that asked for the agent.
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
    """Wait in this fork for the agent's order to start ranks, then run them. If the agent ends first, end too."""
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
    """Wait for the agent's order, and return it; ``None`` if the agent has ended or closed its end of the socket."""
    with line:
        data, descriptors, _, _ = socket.recv_fds(line, _LONGEST, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    message = messages.decode(json.loads(data))
    assert isinstance(message, messages.StartRanks)
    return _with(read(message.path), dict(zip(message.names, descriptors)))


def read(path: str) -> NodeOrder:
    """Read the launcher's order (what it must run) from the file to which the agent has written it.

    Remove the file if the ranks will be forks of the launcher, which have its content already. Otherwise, the ranks are
    new processes, which read the file too.
    """
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
    """Write the launcher's order to a file, and return the file's path.

    The launcher gets the path and not the order, because an order may contain a function that is too large for a
    message.
    """
    path = str(layout.order(order.folder))
    with open(path, "wb") as file:
        pickle.dump(order, file)
    return path
