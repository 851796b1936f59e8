"""On a node: whether ranks do anything, and what each of them is doing.

A rank shows life by what it writes and by the CPU time of its processes. What it is doing it writes itself, by
faulthandler, on a signal: that works while it waits in C code, holding the interpreter's lock or not.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path

from distributor.machine import processes
from distributor.values import layout
from distributor.values.layout import ALL_STACKS_SIGNAL, MAIN_STACK_SIGNAL

#: Bytes of stacks that one rank may send.
_MAX_STACKS = 256 << 10

#: The share of one CPU below which a rank does nothing: threads that only look whether to go on use less.
_IDLE_SHARE = 0.02

#: Seconds between looks at what a rank has written of its stacks.
_LOOK = 0.02


class Activity:
    """When the ranks of a node last did something.

    Args:
        pids: their processes.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._cpu: dict[int, float] = {}
        self._logged = 0
        self._looked = self._active = time.monotonic()

    def look(self, logged: int) -> float:
        """Seconds since any of the ranks wrote something or used CPU time, as of now.

        Args:
            logged: bytes that they have written so far, together.
        """
        now = time.monotonic()
        used = processes.cpu_seconds(self._pids.values())
        cpu = {rank: used[pid] for rank, pid in self._pids.items()}
        least = _IDLE_SHARE * (now - self._looked)
        if logged > self._logged or any(used - self._cpu.get(rank, 0.0) > least for rank, used in cpu.items()):
            self._active = now
        self._cpu, self._logged, self._looked = cpu, logged, now
        return now - self._active


def ask_stacks(folder: Path, pids: Mapping[int, int], all_threads: bool) -> dict[int, int]:
    """Has ranks write what they are doing now; how much each has written of that before, in bytes.

    Args:
        folder: the node's.
        pids: processes by local rank.
        all_threads: of all threads, or of the main thread only.
    """
    before = {}
    for local_rank, pid in pids.items():
        before[local_rank] = _size(layout.stacks(folder, local_rank))
        try:
            os.kill(pid, ALL_STACKS_SIGNAL if all_threads else MAIN_STACK_SIGNAL)
        except ProcessLookupError:
            continue
    return before


async def stacks(folder: Path, pids: Mapping[int, int], before: Mapping[int, int], timeout: float) -> dict[int, str]:
    """What ranks that were asked are doing, by local rank: faulthandler's text, or why there is none.

    Args:
        folder: the node's.
        pids: processes by local rank.
        before: what :func:`ask_stacks` has returned.
        timeout: seconds that a rank may take to answer.
    """
    texts = await asyncio.gather(*(_answer(folder, rank, pid, before[rank], timeout) for rank, pid in pids.items()))
    return dict(zip(pids, texts))


async def _answer(folder: Path, local_rank: int, pid: int, before: int, timeout: float) -> str:
    """Waits for a whole dump: something that has stopped growing."""
    path, end, size = layout.stacks(folder, local_rank), time.monotonic() + timeout, before
    while time.monotonic() < end:
        await asyncio.sleep(_LOOK)
        now = _size(path)
        if now > before and now == size:
            with path.open("rb") as file:
                file.seek(max(before, now - _MAX_STACKS))  # the main thread comes last
                return file.read(_MAX_STACKS).decode(errors="replace")
        size = now
    state = processes.state(pid)
    if state is None:
        return "it has ended"
    names = {"D": "in the kernel", "T": "stopped by a signal", "t": "stopped by a debugger"}
    return f"no answer within {timeout:g} s (state {state}{': ' + names[state] if state in names else ''})"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
