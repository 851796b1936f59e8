"""Kills the ranks of a failed attempt as soon as they are not writing a file, so that the next attempt can begin."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from distributor.machine.open_files import FileState, regular

_LOOK = 0.05  # seconds between checks of open files

_QUIET = 1.0  # seconds without a change after which an open file, such as a log, is not being written


async def kill_idle(alive: Callable[[], Mapping[int, int]], folder: str, killed: set[int]) -> None:
    """Kill each rank that has no file open for writing, or has not written for a second, until none is alive.

    Files in the node's private ``folder`` do not count. After the grace period, the launcher kills ranks that still
    write.
    """
    before: dict[int, dict[str, FileState]] = {}
    while pids := alive():
        for local_rank, pid in pids.items():
            now = regular(pid, folder)
            if not is_writing(before.get(local_rank), now, time.time()):
                kill(local_rank, pid, killed)
            before[local_rank] = now
        await asyncio.sleep(_LOOK)


def kill(local_rank: int, pid: int, killed: set[int]) -> None:
    """Kill a rank, whose end then does not count as a failure."""
    killed.add(local_rank)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_writing(before: Mapping[str, FileState] | None, now: Mapping[str, FileState], clock: float) -> bool:
    """Return whether a process seems to be writing a file; ``before`` is ``None`` at the first check.

    >>> is_writing(None, {"/data/log": FileState(10, 95 * 10**9)}, 100.0)
    False
    >>> is_writing({"/data/log": FileState(10, 95 * 10**9)}, {"/data/log": FileState(11, 95 * 10**9)}, 100.0)
    True
    """
    for path, state in now.items():
        changed = before is not None and before.get(path) != state
        if changed or abs(clock - state.mtime_ns / 1e9) < _QUIET:
            return True
    return False
