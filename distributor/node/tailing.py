"""On a node: follows the ranks' log files and passes on what is new.

The files are the buffer: ranks write to them at the speed of the disk, and what the driver does not have yet stays
there. What it has, or nobody will ask for, is given back to the file system while the files keep their offsets.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distributor.channel import frames
from distributor.channel.node import Offsets, Uplink
from distributor.values import outcome

#: Seconds between looks at files that had nothing new.
_INTERVAL = 0.05

#: Bytes of a rank's output that travel with its failure.
_TAIL_BYTES = 8 << 10

#: Live lines that are so many bytes behind are skipped, unless the driver keeps them in files.
MAX_LAG = 8 << 20

#: Bytes that are passed on of what was skipped: its end, so that a reader sees where it goes on.
_KEEP_OF_LAG = 64 << 10

#: Disk space is given back in steps of so many bytes.
_RELEASE_STEP = 4 << 20

# fallocate(2)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


@dataclass
class _File:
    rank: int
    stream: int
    path: Path
    shipped: bool
    descriptor: int = -1
    offset: int = 0  # passed on up to here
    seen: int = 0  # read up to here at least once
    acked: int = 0  # the driver has it up to here
    released: int = 0  # given back to the file system up to here


@dataclass(frozen=True)
class Rest:
    """What the driver does not have of a log file: all from ``offset`` on."""

    rank: int
    stream: int
    path: str
    offset: int


class Tailing:
    """Follows log files of ranks.

    Args:
        files: rank, stream (1 stdout, 2 stderr, 3 uncaught exception) and path of each.
        shipped: whose lines the driver wants; ``None`` for all.
        keep: the driver keeps them in files: nothing may be skipped.
    """

    def __init__(self, files: Iterable[tuple[int, int, Path]], shipped: Iterable[int] | None, keep: bool) -> None:
        wanted = None if shipped is None else set(shipped)
        self._files = [_File(*file, shipped=keep or wanted is None or file[0] in wanted) for file in files]
        self._keep = keep
        self._uplink: Uplink | None = None
        #: The last bytes of each rank, stdout and stderr as they were read; what it raised is told elsewhere.
        self.tails: dict[int, bytes] = {}
        #: Bytes that all ranks have written so far.
        self.seen = 0

    def ship_to(self, uplink: Uplink) -> None:
        """From now on, lines go there."""
        self._uplink = uplink

    def stop_shipping(self) -> None:
        """The channel is gone for good."""
        self._uplink = None

    def driver_has(self, offsets: Offsets, again: bool) -> None:
        """The driver's word on how far it is; ``again`` after a break: shipping goes on from there."""
        for file in self._files:
            file.acked = min(file.offset, offsets.get((file.rank, file.stream), 0))
            if again and file.shipped:
                file.offset = file.acked
            self._release(file, file.acked)

    async def follow(self) -> None:
        """Passes on what comes, until cancelled."""
        while True:
            behind = await self._pass_on()
            await asyncio.sleep(0 if behind else _INTERVAL)

    async def drain(self) -> None:
        """Passes on what is there now; whoever still writes has escaped, and would never let it end."""
        ends = {id(file): _size(file) for file in self._files}
        while any(file.offset < ends[id(file)] for file in self._files):
            await self._pass_on()
            await asyncio.sleep(0)

    def rest(self) -> list[Rest]:
        """What of the logs the driver should keep and does not have."""
        return [
            Rest(file.rank, file.stream, str(file.path), file.acked)
            for file in self._files
            if self._keep and _size(file) > file.acked
        ]

    async def _pass_on(self) -> bool:
        """One round over all files, a bounded piece of each; whether some have more."""
        behind = False
        for file in self._files:
            if file.descriptor < 0:
                with suppress(FileNotFoundError):
                    file.descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
            if file.descriptor < 0:
                continue
            if file.shipped and self._uplink is not None and not self._keep:
                self._skip(file, self._uplink)
            start = file.offset if file.shipped else max(file.seen, _size(file) - _TAIL_BYTES)
            data = os.pread(file.descriptor, frames.MAX_LOG, start)
            if not data:
                continue
            behind = behind or len(data) == frames.MAX_LOG
            # Counted before the wait: a cancelled round must not send it twice.
            file.offset = start + len(data)
            if file.offset > file.seen:
                self.seen += file.offset - file.seen
                new = data[max(0, file.seen - start) :]
                file.seen = file.offset
                if file.stream != outcome.UNCAUGHT:
                    self.tails[file.rank] = (self.tails.get(file.rank, b"") + new)[-_TAIL_BYTES:]
            if file.shipped and self._uplink is not None:
                await self._uplink.send_log(outcome.Log(file.rank, file.stream, start, data))
            elif not self._keep:
                self._release(file, file.offset)
        return behind

    def _skip(self, file: _File, uplink: Uplink) -> None:
        """Lets a live view that is far behind go on near the end of the file, at the beginning of a line."""
        size = _size(file)
        if size - file.offset <= MAX_LAG:
            return
        lines, offset = 0, file.offset
        while offset < size - _KEEP_OF_LAG:
            piece = os.pread(file.descriptor, min(1 << 20, size - _KEEP_OF_LAG - offset), offset)
            lines += piece.count(b"\n")
            offset += len(piece)
        rest = os.pread(file.descriptor, _KEEP_OF_LAG, offset)
        newline = rest.find(b"\n")
        if newline >= 0:
            lines, offset = lines + 1, offset + newline + 1
        self.seen += max(0, offset - file.seen)
        file.offset, file.seen = offset, max(file.seen, offset)
        uplink.send({"event": "skipped", "rank": file.rank, "stream": file.stream, "lines": lines, "offset": offset})

    def _release(self, file: _File, until: int) -> None:
        """Gives the disk space of a file back up to an offset; its size and later offsets stay (fallocate(2))."""
        size = until - file.released
        if size < _RELEASE_STEP or file.descriptor < 0 or sys.platform != "linux":
            return
        where, length = ctypes.c_longlong(file.released), ctypes.c_longlong(size)
        # A file system that cannot do it frees no space; nothing else comes of it.
        ctypes.CDLL(None).fallocate(file.descriptor, _KEEP_SIZE | _PUNCH_HOLE, where, length)
        file.released = until


def _size(file: _File) -> int:
    try:
        return file.path.stat().st_size
    except FileNotFoundError:
        return 0
