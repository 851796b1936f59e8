"""Keep the states of ranks in this node's shared memory for the next job of the run, after the agent has ended.

A *state* is what a rank passes to ``save_checkpoint``. An agent cannot stay until the next job has loaded the states,
because its Spark task waits for the agent to end. So the agent leaves a process behind, the *keeper*, which becomes the
owner of the folder with the states. At the first of three events, the keeper removes the folder and ends:

- The run ends. The keeper notices this because the driver closes its connection to the keeper.
- Ranks of a later job have saved their own states on this machine. The earlier states are then not needed any more.
- The next job has had enough time to start and to load the states.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from distributor.channel import lines
from distributor.channel.peers import PeerServer
from distributor.machine import bootstrap, folders, processes, state_folders
from distributor.node import copies
from distributor.values.checkpoints import SharedMemory
from distributor.values.job import Job
from distributor.values.messages import Holding
from distributor.values.plan import AgentOrder

#: Number of seconds between checks of whether a later job has saved states on this machine.
_LOOK = 0.5

#: Number of seconds that the ranks of the next job have to load a state after they have started.
_LOADING = 60.0


async def begin(
    job: Job, order: AgentOrder, memory: SharedMemory | None, address: str, *, reached: bool
) -> Keeper | None:
    """Begin to exchange states with ranks of other nodes, and return the :class:`Keeper`.

    A *state* is what a rank passes to ``save_checkpoint``.

    Return ``None`` if the nodes of this job do not exchange states.

    Args:
        job: the job, which says whether nodes exchange states.
        order: the order that the agent got from its owner (the process that started the agent).
        memory: the node's folder for states in shared memory; ``None`` if ranks keep none there.
        address: the node's address.
        reached: whether the driver can be reached. If not, no states are kept after the agent has ended.
    """
    if memory is None or job.peers is None:
        return None
    server = copies.serve(job.run_id, job.peers, memory, address)
    line = await asyncio.get_running_loop().run_in_executor(None, _hold, order) if reached else None
    return Keeper(job, order.folder, memory.folder, server, line)


def _hold(order: AgentOrder) -> ssl.SSLSocket | None:
    """Return a connection that the driver closes when the run ends; ``None`` if no connection can be opened."""
    if order.endpoint is None:
        return None
    try:
        line = lines.connect(order.endpoint)
        line.sendall(lines.pack(Holding(order.executor, order.secret)))
    except OSError:
        return None
    return line


class Keeper:
    """Sends ranks' states to other nodes while the agent lives, and can leave behind a process that keeps the states.

    A *state* is what a rank passes to ``save_checkpoint``. The node's shared memory holds the states.

    Args:
        job: the job whose ranks' states are kept.
        private: the node's private folder.
        folder: the folder with the states in shared memory.
        server: sends ranks' states to other nodes, and receives copies of states of other nodes' ranks.
        line: a connection that the driver closes when the run ends; ``None`` if there is no such connection.
    """

    def __init__(self, job: Job, private: str, folder: str, server: PeerServer, line: ssl.SSLSocket | None) -> None:
        self._job = job
        self._private = private
        self._folder = folder
        self._server = server
        self._line = line

    def end(self, *, keep: bool) -> None:
        """End the server that sends ranks' states to other nodes. If ``keep``, leave a process that keeps the states.

        A *state* is what a rank passes to ``save_checkpoint``. The process that is left behind keeps the states for the
        run's next job. Such a process is started only if there are states, and if a connection to the driver shows
        that the run has not ended.

        The process that is left behind is a fork of the agent. Other threads of the agent may hold locks at the moment
        of the fork, so this process uses nothing that takes a lock.
        """
        self._server.close()
        if not keep or self._line is None or _has_ended(self._line) or not any(Path(self._folder).glob("*.record")):
            return
        own = folders.make(self._job.job_id)
        lock = folders.claim(own)
        folders.note_elsewhere(own, [self._folder], to_the_end=True)
        os.unlink(f"{self._private}/{folders.ELSEWHERE_TO_THE_END}")  # from now on, the keeper removes the folder
        if os.fork() == 0:
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, _leave)
                bootstrap.overwrite_argument("agent", bootstrap.KEEPER)
                _let_go({self._line.fileno(), lock.fileno()})
                until = time.monotonic() + self._job.deadlines.start_timeout + _LOADING
                _watch(self._line, self._job.run_id, self._job.attempt, until)
            finally:
                folders.remove(own)
                os._exit(0)
        lock.close()


def _leave(*_: object) -> NoReturn:
    raise SystemExit


def _let_go(keep: set[int]) -> None:
    """Close all file descriptors of this process, a fork of the agent, except those in ``keep``.

    If this fork kept the agent's other descriptors open, other processes would wait until the fork ends. For example,
    readers of the agent's output would wait for more output.

    Args:
        keep: the descriptors that stay open.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with suppress(OSError):  # the descriptor of the listing is closed already
                os.close(int(name))


def _watch(line: ssl.SSLSocket, run_id: str, attempt: int, until: float) -> None:
    """Wait until no job needs the kept states of ranks any more, at most until the time ``until``."""
    while time.monotonic() < until:
        if processes.readable([line.fileno()], _LOOK) and _has_ended(line):
            return
        if any(found.attempt > attempt and found.is_complete for found in state_folders.find(run_id)):
            return


def _has_ended(line: ssl.SSLSocket) -> bool:
    """Return whether the driver has closed a connection. The driver sends only TLS's own messages over it."""
    line.settimeout(0.0)
    try:
        return not line.recv(1)
    except ssl.SSLWantReadError:
        return False
    except OSError:
        return True
