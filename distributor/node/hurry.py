"""Kill the ranks of a failed attempt as soon as they are not writing a file, so that the next attempt can begin."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from distributor.machine.open_files import State, regular

#: Number of seconds between two checks of the files that ranks have open.
_LOOK = 0.05

#: Number of seconds without a change after which an open file, such as a log, counts as not being written.
_QUIET = 1.0


async def kill_idle(alive: Callable[[], Mapping[int, int]], folder: str, killed: set[int]) -> None:
    """Kill each rank that has no regular file open for writing, or has not written to its files for a second.

    This coroutine ends once no rank is alive. If ranks still write at the end of the grace period, the launcher kills
    them.

    Args:
        alive: returns the pids of living ranks, by local rank.
        folder: the node's private folder, whose files do not count. A rank that writes only to files in this folder is
            killed like one that has no file open.
        killed: the local ranks that are killed are added to this set.
    """
    before: dict[int, dict[str, State]] = {}
    while pids := alive():
        for local_rank, pid in pids.items():
            now = regular(pid, folder)
            if not is_writing(before.get(local_rank), now, time.time()):
                kill(local_rank, pid, killed)
            before[local_rank] = now
        await asyncio.sleep(_LOOK)


def kill(local_rank: int, pid: int, killed: set[int]) -> None:
    """Kill a rank, and add it to ``killed``, so that its end does not count as a failure."""
    killed.add(local_rank)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_writing(before: Mapping[str, State] | None, now: Mapping[str, State], clock: float) -> bool:
    """Return whether a process seems to be writing any of its open files.

    Args:
        before: the files that the process had open for writing at the previous check; ``None`` at the first check.
        now: the files that the process has open for writing now.
        clock: the time, in seconds since the epoch.

    >>> is_writing(None, {"/data/log": State(10, 95 * 10**9)}, 100.0)
    False
    >>> is_writing({"/data/log": State(10, 95 * 10**9)}, {"/data/log": State(11, 95 * 10**9)}, 100.0)
    True
    """
    for path, state in now.items():
        changed = before is not None and before.get(path) != state
        if changed or abs(clock - state.mtime_ns / 1e9) < _QUIET:
            return True
    return False
