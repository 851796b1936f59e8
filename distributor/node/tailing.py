"""Follow the ranks' log files on a node and pass on new output.

The files are the buffer: ranks write at the speed of the disk, and output stays in the files until the driver has it.
Disk space of output that the driver has, or that will not be needed, is freed. The files keep their offsets.
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
from distributor.values.messages import Rest, Skipped

#: Number of seconds between checks of files that had nothing new.
_INTERVAL = 0.05

#: Number of bytes of a rank's last output that its failure report includes.
_TAIL_BYTES = 8 << 10

#: If live lines are more than this number of bytes behind, they are skipped, unless the driver keeps them in files.
MAX_LAG = 8 << 20

#: Number of bytes before the end of the file that are not skipped, so that a reader sees where the output goes on.
_KEEP_OF_LAG = 64 << 10

#: Minimum number of bytes of disk space that is freed at a time.
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
    offset: int = 0  # passed on up to this byte
    seen: int = 0  # read up to this byte at least once
    acked: int = 0  # received by the driver up to this byte
    released: int = 0  # disk space freed up to this byte


class Tailing:
    """A follower of the ranks' log files.

    Args:
        files: rank, stream (1 stdout, 2 stderr, 3 uncaught exception) and path of each.
        shipped: the ranks whose lines the driver wants; ``None`` for all.
        keep: whether the driver keeps the lines of all ranks in files, so that nothing may be skipped.
    """

    def __init__(self, files: Iterable[tuple[int, int, Path]], shipped: Iterable[int] | None, keep: bool) -> None:
        wanted = None if shipped is None else set(shipped)
        self._files = [_File(*file, shipped=keep or wanted is None or file[0] in wanted) for file in files]
        self._keep = keep
        self._uplink: Uplink | None = None
        #: The last bytes of each rank's stdout and stderr, in the order read. Uncaught exceptions are not included.
        self.tails: dict[int, bytes] = {}
        #: Total number of bytes that the ranks have written so far, as seen here.
        self.seen = 0

    def ship_to(self, uplink: Uplink) -> None:
        """Send lines over this uplink from now on."""
        self._uplink = uplink

    def stop_shipping(self) -> None:
        """Stop sending lines: the channel is gone for good."""
        self._uplink = None

    def driver_has(self, offsets: Offsets, again: bool) -> None:
        """Note how many bytes of each file the driver has. ``again``: after a break, sending resumes from there."""
        for file in self._files:
            file.acked = min(file.offset, offsets.get((file.rank, file.stream), 0))
            if again and file.shipped:
                file.offset = file.acked
            self._release(file, file.acked)

    def begin_again(self) -> None:
        """Forget the last output of each rank: what comes from now on is another attempt's."""
        self.tails = {}

    async def follow(self) -> None:
        """Pass on new output until cancelled."""
        while True:
            behind = await self._pass_on()
            await asyncio.sleep(0 if behind else _INTERVAL)

    async def drain(self) -> None:
        """Pass on what the files contain now.

        A process that still writes has escaped the clean-up, and waiting for it might never end.
        """
        ends = {id(file): _size(file) for file in self._files}
        while any(file.offset < ends[id(file)] for file in self._files):
            await self._pass_on()
            await asyncio.sleep(0)

    def rest(self) -> tuple[Rest, ...]:
        """Return the parts of the logs that the driver must keep and does not have yet."""
        return tuple(
            Rest(file.rank, file.stream, str(file.path), file.acked)
            for file in self._files
            if self._keep and _size(file) > file.acked
        )

    async def _pass_on(self) -> bool:
        """Pass on a bounded piece of each file, and return whether some files have more."""
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
            # Counted before the await, so that the data is not sent twice if this round is cancelled.
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
        """Skip ahead if the live view is far behind: to the start of a line near the end of the file."""
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
        uplink.send(Skipped(file.rank, file.stream, lines, offset))

    def _release(self, file: _File, until: int) -> None:
        """Free a file's disk space up to an offset. The file's size and all offsets stay the same (fallocate(2))."""
        size = until - file.released
        if size < _RELEASE_STEP or file.descriptor < 0 or sys.platform != "linux":
            return
        where, length = ctypes.c_longlong(file.released), ctypes.c_longlong(size)
        # On a file system without support the call has no effect: no space is freed.
        ctypes.CDLL(None).fallocate(file.descriptor, _KEEP_SIZE | _PUNCH_HOLE, where, length)
        file.released = until


def _size(file: _File) -> int:
    try:
        return file.path.stat().st_size
    except FileNotFoundError:
        return 0
