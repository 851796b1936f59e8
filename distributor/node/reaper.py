"""The guard: the parent of an agent or a warm process, its *charge*, after which it cleans up.

If an agent is killed, the kernel gives its processes to the guard, whatever their session and environment:
PR_SET_CHILD_SUBREAPER. The guard kills them, except keepers, and what a killed warm process has forked.

It also ends a warm process that nobody needs, which does not notice this itself while it imports modules. A guard needs
little memory, because it forks its charge before torch is imported.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import suppress

from distributor.machine import bootstrap, folders, processes

#: Seconds between checks of what no signal tells: whether a warm process's owner and folder are gone, and whether a
#: killed agent has left processes.
_LOOK = 1.0

_NEXT_ROUND = 0.05  # seconds between rounds of kills

_PATIENCE = 1.0  # seconds for a warm process to end by itself after its executor or driver

_KILL_PATIENCE = 10.0  # seconds for killed processes to end; in uninterruptible sleep, they may take longer

#: Only END_SIGNAL kills the charge. The others come to all processes of a machine that shuts down, and an agent handles
#: them itself.
_AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, bootstrap.END_SIGNAL)


def fork(shown: str, instead: str, close: Iterable[int], owner: int | None = None, folder: str | None = None) -> None:
    """Fork the charge, and return in it only: the calling process becomes its guard.

    The guard shows ``instead`` in place of ``shown`` in its command line. It closes the descriptors in ``close``:
    sockets that would otherwise stay open after the charge. A warm process has an ``owner``, the executor or driver
    that it serves, and a ``folder`` through which runs find it.
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
        bootstrap.overwrite(shown, instead)
        _Reaper(charge, owner, folder).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def strays(children: Iterable[int], charge: int | None, spared: Collection[int]) -> list[int]:
    """Return the children to kill: all but the charge and ``spared`` ones.

    >>> strays([10, 11, 12], 10, [12])
    [11]
    """
    return [pid for pid in children if pid != charge and pid not in spared]


class _Reaper:
    """The guard of one process."""

    def __init__(self, charge: int, owner: int | None, folder: str | None) -> None:
        self._charge: int | None = charge
        self._owner = None if owner is None else _Owner(owner)
        self._folder = folder
        self._inode = None if folder is None else _inode(folder)
        self._killing_since: float | None = None

    def run(self) -> None:
        """Wait until the charge has ended, and kill what it leaves behind.

        Forks of a killed warm process are awaited, keepers are not. Processes that SIGKILL does not end are given up.
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
        folders.remove_stale()  # of runs whose driver was killed before an agent had their folders

    def _reap(self) -> bool:
        """Reap ended children, and return whether any still runs."""
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                if ended == self._charge:
                    self._charge = None
            return True
        return False

    def _strays(self) -> list[int]:
        children = processes.children(os.getpid())
        forked = [] if self._folder is None else _forked(children)
        keepers = _keepers(pid for pid in children if pid != self._charge)
        found = strays(children, self._charge, [*forked, *keepers])
        if not found or self._charge is not None or forked:
            self._killing_since = None
        elif self._killing_since is None:
            self._killing_since = time.monotonic()
        return found

    def _leaves(self) -> bool:
        """Return whether the charge has ended and left only keepers, which end by themselves."""
        if self._charge is not None:
            return False
        children = processes.children(os.getpid())
        return len(_keepers(children)) == len(children)

    def _in_vain(self) -> bool:
        return self._killing_since is not None and time.monotonic() - self._killing_since > _KILL_PATIENCE

    def _is_useless(self) -> bool:
        """Return whether the charge is a warm process that nobody needs.

        Its executor or driver has ended, or its folder is gone and none of its forks is left.
        """
        if self._charge is None or self._folder is None:
            return False
        if self._owner is not None and (self._owner.gone_for or 0.0) > _PATIENCE:
            return True
        if _inode(self._folder) == self._inode:
            return False
        return not _forked(processes.children(self._charge))

    def _kill(self, pids: Iterable[int | None]) -> None:
        for pid in pids:
            if pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _forked(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if bootstrap.is_part(pid, *bootstrap.FORKED)]


def _keepers(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if bootstrap.is_part(pid, bootstrap.KEEPER)]


class _Owner:
    """The executor or driver of a warm process."""

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
        """Seconds since its end was noticed; ``None`` if it was not."""
        if self._since is None and self._descriptor is not None and processes.readable([self._descriptor], 0):
            self._since = time.monotonic()
        return None if self._since is None else time.monotonic() - self._since


def _inode(folder: str) -> int | None:
    try:
        return os.stat(folder).st_ino
    except OSError:
        return None
