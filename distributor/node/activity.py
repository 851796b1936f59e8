"""Whether the ranks of a node are active, and what each is doing.

A rank is active if it writes output, or its processes use more CPU time than threads that only poll. At the agent's
signal it writes its stacks to a file, through ``faulthandler``: even while it waits in C code that holds the GIL.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from distributor.machine import processes
from distributor.values import layout, messages
from distributor.values.layout import ALL_STACKS_SIGNAL, MAIN_STACK_SIGNAL

_MAX_STACKS = 256 << 10  # bytes of stacks that one rank sends

_IDLE_SHARE = 0.02  # of one CPU; threads that only poll use less

_LOOK = 0.02  # seconds between checks of a stacks file

#: Maximum delay, in seconds, of an order to stop, so that ranks can write stacks that the driver has requested before.
_LAST_WORDS = 0.3


class Activity:
    """When the ranks were last active; ``pids`` are by local rank."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._cpu: dict[int, float] = {}
        self._logged = 0
        self._looked = self._active = time.monotonic()

    def look(self, logged: int) -> float:
        """Return the seconds since a rank was last active, given the bytes that ranks have written so far."""
        now = time.monotonic()
        used = processes.cpu_seconds(self._pids.values())
        cpu = {rank: used[pid] for rank, pid in self._pids.items()}
        least = _IDLE_SHARE * (now - self._looked)
        if logged > self._logged or any(used - self._cpu.get(rank, 0.0) > least for rank, used in cpu.items()):
            self._active = now
        self._cpu, self._logged, self._looked = cpu, logged, now
        return now - self._active


class StackRequests:
    """Answers the driver's requests for stacks."""

    def __init__(self, folder: str, first_rank: int, send: Callable[[messages.Message], None]) -> None:
        self._folder = Path(folder)
        self._first_rank = first_rank
        self._send = send
        self._pending: set[asyncio.Task[None]] = set()
        self._after: asyncio.Task[None] | None = None

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def ask(self, order: messages.Dump, alive: Mapping[int, int], ended: Iterable[int]) -> None:
        """Ask living ranks for their stacks, and send the driver an answer for each rank."""
        before = ask_stacks(self._folder, alive, order.all_threads)
        dump = asyncio.ensure_future(self._answer(order, alive, list(ended), before))
        self._pending.add(dump)
        dump.add_done_callback(self._pending.discard)

    def then(self, call: Callable[[], None]) -> None:
        """Call a function once all requests are answered, or after :data:`_LAST_WORDS` seconds."""

        async def wait(pending: set[asyncio.Task[None]]) -> None:
            await asyncio.wait(pending, timeout=_LAST_WORDS)
            call()

        self._after = asyncio.ensure_future(wait(set(self._pending)))

    async def _answer(
        self, order: messages.Dump, alive: Mapping[int, int], ended: list[int], before: Mapping[int, int]
    ) -> None:
        texts = dict.fromkeys(ended, "it has ended")
        texts |= await stacks(self._folder, alive, before, order.timeout)
        for local_rank, text in texts.items():
            self._send(messages.StackDump(order.number, self._first_rank + local_rank, text))


def ask_stacks(folder: Path, pids: Mapping[int, int], all_threads: bool) -> dict[int, int]:
    """Ask ranks for their stacks; return the size of each file before, by local rank."""
    before = {}
    for local_rank, pid in pids.items():
        before[local_rank] = _size(layout.stacks(folder, local_rank))
        try:
            os.kill(pid, ALL_STACKS_SIGNAL if all_threads else MAIN_STACK_SIGNAL)
        except ProcessLookupError:
            continue
    return before


async def stacks(folder: Path, pids: Mapping[int, int], before: Mapping[int, int], timeout: float) -> dict[int, str]:
    """Return each rank's stacks, or why they are missing; ``before`` comes from :func:`ask_stacks`."""
    texts = await asyncio.gather(*(_answer(folder, rank, pid, before[rank], timeout) for rank, pid in pids.items()))
    return dict(zip(pids, texts))


async def _answer(folder: Path, local_rank: int, pid: int, before: int, timeout: float) -> str:
    """Wait for the stacks of one rank, complete once their file has grown and then stopped growing."""
    path, end, size = layout.stacks(folder, local_rank), time.monotonic() + timeout, before
    while time.monotonic() < end:
        await asyncio.sleep(_LOOK)
        now = _size(path)
        if now > before and now == size:
            with path.open("rb") as file:
                file.seek(max(before, now - _MAX_STACKS))  # keep the end: the main thread comes last
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
