"""Follows the ranks' log files and passes on new output.

The files are the buffer: ranks write at the speed of the disk. A part that the driver has, or nobody needs, is freed by
punching a hole, fallocate(2), which keeps the size and so all offsets.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distributor.channel import frames
from distributor.channel.node import Offsets, Uplink
from distributor.machine import limits
from distributor.values import outcome
from distributor.values.messages import Rest, Skipped

_INTERVAL = 0.05  # seconds between rounds, unless a file may have more than a round reads

_TAIL_BYTES = 8 << 10  # bytes of last output in a failure report

MAX_LAG = 8 << 20  # bytes that wait; beyond, lines are skipped unless the driver keeps all in files

_KEEP_OF_LAG = 64 << 10  # bytes that are not left out, so that the live view goes on with recent output

_RELEASE_STEP = 4 << 20  # bytes of disk space freed at a time, at least

#: Maximum number of open log files, or a quarter of what this process may open.
_MOST_OPEN = 64
_SHARE_OF_OPEN = 4

_LAST = 64  # bytes before a piece that are read again: other ones show that a rank has truncated the file

_KEEP_SIZE, _PUNCH_HOLE = 1, 2


@dataclass(eq=False)
class _File:
    rank: int
    stream: int
    path: Path
    kept: bool  # the driver keeps all of it, so that nothing may be skipped
    shipped: bool
    base: int = 0  # number of the file's first byte: a rank that truncates the file does not end the stream
    offset: int = 0  # passed on up to this byte
    seen: int = 0  # read up to this byte at least once
    acked: int = 0  # received by the driver up to this byte
    released: int = 0  # disk space freed up to this byte
    last: bytes = b""  # the last bytes that were read

    def begin_again(self) -> None:
        """Go on with what the file has now, since a rank has truncated it."""
        self.base = self.seen = self.released = self.offset
        self.last = b""


class _Descriptors:
    """A cache of descriptors that closes the least recently used one, since a process may not open so many files.

    Files stay open as long as possible: an open file can be read to its end even if a rank has removed it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[_File, int] = {}  # the last used one is at the end

    def size(self, file: _File) -> int:
        """Return the size of a file, or 0; open it while the cache is not full."""
        if file not in self._open and len(self._open) < self._most:
            self.get(file)
        try:
            return os.stat(self._open.get(file, file.path)).st_size
        except OSError:
            return 0

    def get(self, file: _File) -> int | None:
        """Return a descriptor, valid until the next call; ``None`` if the file cannot be opened now."""
        descriptor = self._open.pop(file, None)
        if descriptor is None:
            while len(self._open) >= self._most:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # the file does not exist, or other files of this process take all descriptors
                return None
        self._open[file] = descriptor
        return descriptor


class Tailing:
    """Sends the output of a node's ranks to the driver as it grows.

    ``files`` are rank, stream and path. The driver wants the lines of the ranks in ``shipped``, ``None`` for all, and
    the reports of all ranks. If the driver is to ``keep`` all lines in files, nothing may be skipped.
    """

    def __init__(self, files: Iterable[tuple[int, int, Path]], shipped: Iterable[int] | None, keep: bool) -> None:
        wanted = None if shipped is None else set(shipped)
        self._files = [
            _File(rank, stream, path, kept, shipped=kept or wanted is None or rank in wanted)
            for rank, stream, path in files
            for kept in [keep or stream == outcome.REPORTS]
        ]
        self._descriptors = _Descriptors(max(1, min(_MOST_OPEN, limits.open_files() // _SHARE_OF_OPEN)))
        self._uplink: Uplink | None = None
        self._live = False  # the driver has got output, and may lack the last of it
        self.tails: dict[int, bytes] = {}  # the last of stdout and stderr, in the order read
        self.seen = 0  # bytes that the ranks have written, as seen here

    def ship_to(self, uplink: Uplink) -> None:
        self._uplink, self._live = uplink, True

    def stop_shipping(self) -> None:
        self._uplink = None

    def driver_has(self, offsets: Offsets, again: bool) -> None:
        """Note how much of each file the driver has; after a break (``again``), send from there."""
        for file in self._files:
            file.acked = min(file.offset, offsets.get((file.rank, file.stream), 0))
            if again and file.shipped:
                file.offset = file.acked
                if (lost := file.base - file.acked) > 0:  # the driver accepts no gap, so the bytes get other numbers
                    file.base, file.seen, file.released = file.acked, file.seen - lost, file.released - lost
            self._release(file, file.acked)

    def begin_again(self) -> None:
        """Forget the last output, since what follows belongs to another attempt."""
        self.tails = {}

    async def follow(self) -> None:
        """Pass on new output until cancelled."""
        while True:
            longest = await self._pass_on()
            await asyncio.sleep(0 if longest == frames.MAX_LOG else _INTERVAL)

    async def drain(self) -> None:
        """Pass on what the files contain now.

        A process that still writes has escaped the clean-up of the node, and may never end.
        """
        ends = {file: self._end_of(file) for file in self._files}
        while any(file.offset < end for file, end in ends.items()) and await self._pass_on():
            await asyncio.sleep(0)

    def rest(self) -> tuple[Rest, ...]:
        """Return what the driver has not received: all that it must keep, and the last of what it shows live."""
        return tuple(self._rest())

    def _rest(self) -> Iterator[Rest]:
        for file in self._files:
            end, start = self._end_of(file), max(file.acked, file.base)
            if not file.kept:  # lost with a connection that broke after the last piece was sent
                start = max(start, end - _KEEP_OF_LAG)
            if end > start and (file.kept or (file.shipped and self._live)) and file.path.exists():
                yield Rest(file.rank, file.stream, str(file.path), start, file.base)

    def _end_of(self, file: _File) -> int:
        """Return the number of bytes of a stream, which goes on if a rank has truncated the file."""
        size = self._descriptors.size(file)
        if file.base + size < file.seen:
            file.begin_again()
        return file.base + size

    async def _pass_on(self) -> int:
        """Pass on a bounded piece of each file, and return the bytes of the longest one."""
        longest = 0
        for file in self._files:
            end = self._end_of(file)
            if end <= (file.offset if file.shipped else file.seen):
                continue
            descriptor = self._descriptors.get(file)
            if descriptor is None:
                continue
            if file.shipped and self._uplink is not None and not file.kept:
                self._skip(file, descriptor, self._uplink)
            start = file.offset if file.shipped else max(file.seen, end - _TAIL_BYTES)
            last = file.last if start == file.seen else b""
            data = os.pread(descriptor, len(last) + frames.MAX_LOG, start - file.base - len(last))
            if not data.startswith(last):
                file.begin_again()
                start, last, data = file.offset, b"", os.pread(descriptor, frames.MAX_LOG, 0)
            data = data[len(last) :]
            if not data:
                continue
            file.last = data[-_LAST:]
            longest = max(longest, len(data))
            # Counted before the await, so that the data is not sent twice if this round is cancelled.
            file.offset = start + len(data)
            if file.offset > file.seen:
                self.seen += file.offset - file.seen
                new = data[max(0, file.seen - start) :]
                file.seen = file.offset
                if file.stream < outcome.UNCAUGHT:
                    self.tails[file.rank] = (self.tails.get(file.rank, b"") + new)[-_TAIL_BYTES:]
            if file.shipped and self._uplink is not None:
                await self._uplink.send_log(outcome.Log(file.rank, file.stream, start, data))
            elif not file.kept:
                self._release(file, file.offset - (_KEEP_OF_LAG if self._live else 0))
        return longest

    def _skip(self, file: _File, descriptor: int, uplink: Uplink) -> None:
        """If over :data:`MAX_LAG` bytes are unsent, skip to the start of a line near the file's end."""
        end = self._end_of(file)
        if end - file.offset <= MAX_LAG:
            return
        lines, offset = 0, file.offset
        while offset < end - _KEEP_OF_LAG:
            piece = os.pread(descriptor, min(1 << 20, end - _KEEP_OF_LAG - offset), offset - file.base)
            if not piece:  # a rank has just truncated the file
                return
            lines += piece.count(b"\n")
            offset += len(piece)
        rest = os.pread(descriptor, _KEEP_OF_LAG, offset - file.base)
        newline = rest.find(b"\n")
        if newline >= 0:
            lines, offset = lines + 1, offset + newline + 1
        self.seen += max(0, offset - file.seen)
        file.offset, file.seen, file.last = offset, max(file.seen, offset), b""
        uplink.send(Skipped(file.rank, file.stream, lines, offset))

    def _release(self, file: _File, until: int) -> None:
        """Free a file's disk space up to an offset, except of its last bytes."""
        until -= _LAST
        size = until - file.released
        if size < _RELEASE_STEP or sys.platform != "linux" or (descriptor := self._descriptors.get(file)) is None:
            return
        where, length = ctypes.c_longlong(file.released - file.base), ctypes.c_longlong(size)
        # If the file system does not support this, the call has no effect, and no space is freed.
        ctypes.CDLL(None).fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, where, length)
        file.released = until
