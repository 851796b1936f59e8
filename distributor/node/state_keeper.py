"""The keeper: a fork that the agent leaves behind, which keeps ranks' states in shared memory for the run's next job.

The agent itself cannot stay until the next job has loaded them, because its Spark task waits for its end. The keeper
owns the folder with the states. It removes the folder and ends at the first of three events:

- The run ends: the driver closes its connection to the keeper.
- Ranks of a later job have saved states on this machine, so that the earlier ones are not needed any more.
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

from distributor.channel import connections
from distributor.channel.peers import PeerServer
from distributor.machine import bootstrap, folders, processes, state_folders
from distributor.node import replica_store
from distributor.values.checkpoints import SharedMemory
from distributor.values.job import Job
from distributor.values.messages import HeldStates
from distributor.values.plan import AgentOrder

_LOOK = 0.5  # seconds between checks of whether a later job has saved states

_LOADING = 60.0  # seconds to load a state, once ranks of the next job have started


async def begin(
    job: Job, order: AgentOrder, memory: SharedMemory | None, address: str, *, reached: bool
) -> StateKeeper | None:
    """Begin to exchange states with other nodes' ranks; ``None`` if this job's nodes do not.

    If the driver is not ``reached``, no states are kept after the agent.
    """
    if memory is None or job.peers is None:
        return None
    server = replica_store.serve(job.run_id, job.peers, memory, address)
    line = await asyncio.get_running_loop().run_in_executor(None, _hold, order) if reached else None
    return StateKeeper(job, order.folder, memory.folder, server, line)


def _hold(order: AgentOrder) -> ssl.SSLSocket | None:
    """Return a connection that the driver closes when the run ends; ``None`` if it cannot be reached."""
    if order.endpoint is None:
        return None
    try:
        line = connections.connect(order.endpoint)
        line.sendall(connections.pack(HeldStates(order.executor, order.secret)))
    except OSError:
        return None
    return line


class StateKeeper:
    """Exchanges states while the agent lives, and can then leave a process that keeps them."""

    def __init__(self, job: Job, private: str, folder: str, server: PeerServer, line: ssl.SSLSocket | None) -> None:
        self._job = job
        self._private = private  # the node's folder
        self._folder = folder  # the states, in shared memory
        self._server = server
        self._line = line  # closed by the driver when the run ends

    def end(self, *, keep: bool) -> None:
        """End the exchange of states. If ``keep``, leave a process that keeps them, if there are any and the run lives.

        Other threads of the agent may hold locks at the moment of the fork, so the fork uses nothing that takes a lock.
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
                bootstrap.overwrite("agent", bootstrap.KEEPER)
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
    """Close all other descriptors, since processes wait for their end, such as readers of the agent's output."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with suppress(OSError):  # the descriptor of the listing is closed already
                os.close(int(name))


def _watch(line: ssl.SSLSocket, run_id: str, attempt: int, until: float) -> None:
    """Wait until no job needs the states, or until the time ``until``."""
    while time.monotonic() < until:
        if processes.readable([line.fileno()], _LOOK) and _has_ended(line):
            return
        if any(found.attempt > attempt and found.is_complete for found in state_folders.find(run_id)):
            return


def _has_ended(line: ssl.SSLSocket) -> bool:
    """Return whether the driver has closed a connection, over which it sends only TLS's own messages."""
    line.settimeout(0.0)
    try:
        return not line.recv(1)
    except ssl.SSLWantReadError:
        return False
    except OSError:
        return True
