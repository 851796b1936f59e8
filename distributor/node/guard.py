"""The guard: the parent of an agent or a warm process (its *charge*), which cleans up when the charge has ended.

An agent ends its node's processes itself. If the agent is killed before that, the kernel makes the guard the parent of
the remaining processes, whatever their session and environment (PR_SET_CHILD_SUBREAPER). The guard then kills them,
except keepers (:mod:`distributor.node.keeper`) and agents that a killed warm process leaves.

The guard of a warm process (which forks agents) also ends the warm process once nobody needs it, because the executor
or driver that it serves has ended, or because the folder through which runs find it is gone. A warm process that is
importing modules does not notice this itself. A guard needs little memory, because it forks its charge before torch is
imported.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import suppress

from distributor.machine import bootstrap, processes

#: Number of seconds between checks of a warm process's owner (the executor or driver that it serves) and folder, and of
#: processes that a killed agent has left. No signal tells the guard when these change.
_LOOK = 1.0

#: Number of seconds between two rounds of kills.
_NEXT_ROUND = 0.05

#: Number of seconds that a warm process has to end by itself once its owner (the executor or driver that it serves) has
#: ended.
_PATIENCE = 1.0

#: Number of seconds that the guard waits for killed processes to end. Processes in uninterruptible sleep may end later.
_KILL_PATIENCE = 10.0

#: Signals that the guard waits for. Only at ``END_SIGNAL``, it kills the process that it guards: the others come to all
#: processes of a machine that shuts down, and an agent handles them itself.
_AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, bootstrap.END_SIGNAL)


def fork(shown: str, instead: str, close: Iterable[int], owner: int | None = None, folder: str | None = None) -> None:
    """Fork the *charge*, the process that this process then guards.

    The call returns only in the new process, because the calling process becomes the guard.

    Args:
        shown: the command-line arguments that this process must hide once it is the guard; see
            :func:`~distributor.machine.bootstrap.overwrite_argument`.
        instead: the arguments that the guard shows in place of ``shown``.
        close: descriptors of sockets that only the new process needs. The guard closes its own copies of them.
            Otherwise, the sockets would stay open after the new process has ended.
        owner: pid of the executor or driver that a warm process serves; ``None`` if the new process is an agent.
        folder: the folder through which runs find a warm process; ``None`` if the new process is an agent.
    """
    processes.adopt_orphans()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    charge = os.fork()
    if charge == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    try:
        for descriptor in close:
            os.close(descriptor)
        bootstrap.overwrite_argument(shown, instead)
        _Guard(charge, owner, folder).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def strays(children: Iterable[int], charge: int | None, spared: Collection[int]) -> list[int]:
    """Return the children that the guard kills: all except the process that it guards (``charge``) and ``spared`` ones.

    The guard spares keepers (processes that keep the states of ranks in shared memory for the next job), and the agents
    that a killed warm process has forked.

    >>> strays([10, 11, 12], 10, [12])
    [11]
    """
    return [pid for pid in children if pid != charge and pid not in spared]


class _Guard:
    """The guard of one process, which is called the guard's *charge*.

    Args:
        charge: pid of the guarded process, a child of the guard's process.
        owner: pid of the executor or driver that a guarded warm process serves; ``None`` for an agent.
        folder: the folder through which runs find a guarded warm process; ``None`` for an agent.
    """

    def __init__(self, charge: int, owner: int | None, folder: str | None) -> None:
        self._charge: int | None = charge
        self._owner = None if owner is None else _Owner(owner)
        self._folder = folder
        self._inode = None if folder is None else _inode(folder)
        self._killing_since: float | None = None

    def run(self) -> None:
        """Wait until the guarded process has ended, and kill the processes that it leaves behind. Then return.

        Do not kill keepers (processes that keep ranks' states for the next job), and do not wait for them: they end by
        themselves. Do not kill the agents that a killed warm process has forked either, but wait until they have ended.
        Give up on processes that SIGKILL does not end.
        """
        while self._reap() and not self._in_vain() and not self._leaves():
            if self._is_useless():
                self._kill([self._charge])
            left = self._strays()
            self._kill(each for pid in left for each in (pid, *processes.descendants(pid)))
            told = signal.sigtimedwait(_AWAITED, _NEXT_ROUND if left else _LOOK)
            if told is not None and told.si_signo == bootstrap.END_SIGNAL:
                self._kill([self._charge])
        if self._folder is not None and self._owner is not None and self._owner.gone_for is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reap(self) -> bool:
        """Reap all children that have ended. Return whether any child still runs."""
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                if ended == self._charge:
                    self._charge = None
            return True
        return False

    def _strays(self) -> list[int]:
        children = processes.children(os.getpid())
        agents = [] if self._folder is None else [pid for pid in children if bootstrap.is_part(pid, "agent")]
        keepers = _keepers(pid for pid in children if pid != self._charge)
        found = strays(children, self._charge, [*agents, *keepers])
        if not found or self._charge is not None or agents:
            self._killing_since = None
        elif self._killing_since is None:
            self._killing_since = time.monotonic()
        return found

    def _leaves(self) -> bool:
        """Return whether the guarded process and all processes that it has left behind, except keepers, have ended.

        The guard need not wait for keepers (processes that keep ranks' states for the next job), because they end by
        themselves.
        """
        if self._charge is not None:
            return False
        children = processes.children(os.getpid())
        return len(_keepers(children)) == len(children)

    def _in_vain(self) -> bool:
        return self._killing_since is not None and time.monotonic() - self._killing_since > _KILL_PATIENCE

    def _is_useless(self) -> bool:
        """Return whether the guarded process is a warm process that nobody needs any more.

        Either the warm process's executor or driver has ended, or its folder is gone and none of its agents is left.
        """
        if self._charge is None or self._folder is None:
            return False
        if self._owner is not None and (self._owner.gone_for or 0.0) > _PATIENCE:
            return True
        if _inode(self._folder) == self._inode:
            return False
        return not any(bootstrap.is_part(pid, "agent") for pid in processes.children(self._charge))

    def _kill(self, pids: Iterable[int | None]) -> None:
        for pid in pids:
            if pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _keepers(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if bootstrap.is_part(pid, bootstrap.KEEPER)]


class _Owner:
    """The executor or driver that a warm process serves, watched through a process descriptor."""

    def __init__(self, pid: int) -> None:
        self._since: float | None = None
        self._descriptor: int | None = None
        try:
            self._descriptor = processes.pidfd_open(pid)
        except ProcessLookupError:
            self._since = time.monotonic()
        except OSError:  # the kernel has no process descriptors, so the warm process ends with an error by itself
            pass

    @property
    def gone_for(self) -> float | None:
        """Number of seconds since the end of this executor or driver was noticed; ``None`` if no end was noticed."""
        if self._since is None and self._descriptor is not None and processes.readable([self._descriptor], 0):
            self._since = time.monotonic()
        return None if self._since is None else time.monotonic() - self._since


def _inode(folder: str) -> int | None:
    """Return the inode of a folder; ``None`` if it is gone."""
    try:
        return os.stat(folder).st_ino
    except OSError:
        return None
