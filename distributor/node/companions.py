"""The companions of an attempt: the agent starts them before the ranks and ends them after the ranks."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distributor.machine import bootstrap, processes
from distributor.text.wording import NOT_READY
from distributor.values import layout
from distributor.values.plan import Companion, CompanionOrder, NodeOrder

_PATIENCE = 5.0  # seconds from SIGTERM to SIGKILL

_TAIL_BYTES, _TAIL_LINES = 8 << 10, 20  # of a companion's output in an error


@dataclass
class _Started:
    """A companion's process."""

    companion: Companion
    process: subprocess.Popen[bytes]
    pidfd: int
    ready: bool = False
    ended: bool = False


class Companions:
    """The companions of one attempt.

    ``on_death`` gets the exit code of a companion that ends before it is stopped, and the text of the error.
    """

    def __init__(self, order: NodeOrder, on_death: Callable[[int, str], None]) -> None:
        self._order = order
        self._on_death = on_death
        self._started: list[_Started] = []
        self._changed = asyncio.Event()
        self._interrupted = False
        self._stopping = False

    async def start(self, own: set[int]) -> bool:
        """Start the companions, and return whether all are ready.

        ``False`` as soon as one has ended, or :meth:`interrupt` is called. Their pids are added to ``own``, the
        processes that the agent must not reap.
        """
        for companion in self._order.plan.companions:
            self._started.append(self._start(companion))
            own.add(self._started[-1].process.pid)
        while not self._interrupted and not any(each.ended for each in self._started):
            if all(each.ready for each in self._started):
                return True
            await self._change()
        return False

    def interrupt(self) -> None:
        """Make :meth:`start` return at once."""
        self._interrupted = True
        self._changed.set()

    async def stop(self) -> None:
        """End the companions with SIGTERM, and with SIGKILL :data:`_PATIENCE` seconds later."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    while not all(each.ended for each in self._started):
                        await self._change()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, after which an end is no error."""
        self._stopping = True
        for each in self._started:
            if not each.ended:
                each.process.send_signal(number)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _start(self, companion: Companion) -> _Started:
        folder = self._order.folder
        path = layout.companion_order(folder, companion.name)
        path.write_bytes(pickle.dumps(CompanionOrder(companion, self._order.sys_path)))
        heard, ready = os.pipe()
        try:
            with open(layout.companion_log(folder, companion.name), "wb") as log:
                process = subprocess.Popen(
                    bootstrap.command(self._order.root, "companion", str(path), str(os.getpid()), str(ready)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**self._order.environ, **companion.environment},
                    cwd=self._order.cwd,
                    pass_fds=[ready],
                    start_new_session=True,
                )
        finally:
            os.close(ready)
        started = _Started(companion, process, processes.pidfd_open(process.pid))
        loop = asyncio.get_running_loop()
        loop.add_reader(heard, self._on_word, started, heard)
        loop.add_reader(started.pidfd, self._on_end, started)
        return started

    def _on_word(self, started: _Started, heard: int) -> None:
        """Note whether a companion is ready: it writes to its pipe, which closes without that if it ends before."""
        started.ready = bool(os.read(heard, 1))
        self._changed.set()
        asyncio.get_running_loop().remove_reader(heard)
        os.close(heard)

    def _on_end(self, started: _Started) -> None:
        asyncio.get_running_loop().remove_reader(started.pidfd)
        os.close(started.pidfd)
        code = started.process.wait()
        started.ended = True
        self._changed.set()
        if not self._stopping:
            name = started.companion.name
            tail = _last_lines(layout.companion_log(self._order.folder, name))
            self._on_death(code, describe(name, self._order.host, code, started.ready, tail))


def describe(name: str, host: str, code: int, ready: bool, tail: str) -> str:
    """Return the error for a companion that has ended too early; ``tail`` is the end of its output.

    >>> describe("head", "host-b", 3, True, "")
    'the companion head on host-b exited with code 3'
    """
    how = f"was killed by {processes.signal_name(-code)}" if code < 0 else f"exited with code {code}"
    text = f"the companion {name} on {host} {how}{'' if ready else f' {NOT_READY}'}"
    return f"{text}\n\nIts last lines:\n{tail}" if tail else text


def _last_lines(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:])
