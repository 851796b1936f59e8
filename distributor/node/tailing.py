"""Follow the ranks' log files on a node and pass on new output.

The files serve as a buffer. Ranks write at the speed of the disk, and output stays in the files until the driver has
received it. When the driver has received a part of a file, or if nobody needs that part, this module frees the part's
disk space by punching a hole into the file (fallocate(2)). The file keeps its size, so offsets stay valid.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distributor.channel import frames
from distributor.channel.node import Offsets, Uplink
from distributor.machine import limits
from distributor.values import outcome
from distributor.values.messages import Rest, Skipped

#: Number of seconds between two rounds of reading the files, unless a file may have more than a round reads of it.
_INTERVAL = 0.05

#: Number of bytes of a rank's last output that its failure report includes.
_TAIL_BYTES = 8 << 10

#: If more than this number of bytes of a rank's log file wait to be sent to the driver, the agent skips lines, unless
#: the driver keeps all lines in files.
MAX_LAG = 8 << 20

#: Number of bytes at the end of a log file that the agent does not skip, so that the driver's live view goes on with
#: recent output.
_KEEP_OF_LAG = 64 << 10

#: Minimum number of bytes of disk space that are freed at a time.
_RELEASE_STEP = 4 << 20

#: Maximum number of log files that are open at a time. If the process may open only a few files, the maximum is a
#: quarter of this limit of the process.
_MOST_OPEN = 64
_SHARE_OF_OPEN = 4

# Flags of fallocate(2).
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


@dataclass(eq=False)
class _File:
    rank: int
    stream: int
    path: Path
    kept: bool  # the driver keeps all of it, so that nothing may be skipped
    shipped: bool
    offset: int = 0  # passed on up to this byte
    seen: int = 0  # read up to this byte at least once
    acked: int = 0  # received by the driver up to this byte
    released: int = 0  # disk space freed up to this byte


class _Descriptors:
    """A cache of descriptors of open log files. A full cache closes the least recently used descriptor.

    The cache has a limit because a node may have more log files than a process may open. Files stay open as long as
    possible because an open file can be read to its end even if a rank has removed it.

    Args:
        most: the maximum number of open descriptors.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[_File, int] = {}  # the last used one is at the end

    def size(self, file: _File) -> int:
        """Return the size of a file; 0 if there is no such file. If the cache is not full, also open the file."""
        if file not in self._open and len(self._open) < self._most:
            self.get(file)
        try:
            return os.stat(self._open.get(file, file.path)).st_size
        except OSError:
            return 0

    def get(self, file: _File) -> int | None:
        """Return a descriptor of a file, valid until the next call; ``None`` if the file cannot be opened now."""
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
    """Reads the log files of a node's ranks as they grow, and sends new output to the driver.

    Args:
        files: rank, stream (1 stdout, 2 stderr, 3 uncaught exception, 4 reports) and path of each log file.
        shipped: the ranks whose lines the driver wants; ``None`` for all. All ranks' reports are sent anyway.
        keep: whether the driver keeps the lines of all ranks in files, so that nothing may be skipped.
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
        #: The last bytes of each rank's stdout and stderr, in the order read. Uncaught exceptions are not included.
        self.tails: dict[int, bytes] = {}
        #: Total number of bytes that the ranks have written so far, as seen here.
        self.seen = 0

    def ship_to(self, uplink: Uplink) -> None:
        """From now on, send output over this uplink (the agent's end of the channel)."""
        self._uplink = uplink

    def stop_shipping(self) -> None:
        """Stop sending lines to the driver, because the connection to it is lost for good."""
        self._uplink = None

    def driver_has(self, offsets: Offsets, again: bool) -> None:
        """Note how many bytes of each log file the driver has received.

        ``again`` means that a broken connection has been restored. In that case, send the log files again from the
        positions that ``offsets`` gives.
        """
        for file in self._files:
            file.acked = min(file.offset, offsets.get((file.rank, file.stream), 0))
            if again and file.shipped:
                file.offset = file.acked
            self._release(file, file.acked)

    def begin_again(self) -> None:
        """Forget the last output of each rank, since output from now on belongs to another attempt."""
        self.tails = {}

    async def follow(self) -> None:
        """Pass on new output of the ranks until this coroutine is cancelled."""
        while True:
            longest = await self._pass_on()
            await asyncio.sleep(0 if longest == frames.MAX_LOG else _INTERVAL)

    async def drain(self) -> None:
        """Pass on what the log files contain now. Ignore what is written later, and output that can no longer be read.

        A process that still writes to a log file has escaped the clean-up of the node, and may never end.
        """
        ends = {file: self._descriptors.size(file) for file in self._files}
        while any(file.offset < end for file, end in ends.items()) and await self._pass_on():
            await asyncio.sleep(0)

    def rest(self) -> tuple[Rest, ...]:
        """Return the parts of the ranks' log files that the driver must keep but has not received yet."""
        return tuple(
            Rest(file.rank, file.stream, str(file.path), file.acked)
            for file in self._files
            if file.kept and self._descriptors.size(file) > file.acked
        )

    async def _pass_on(self) -> int:
        """Pass on a bounded piece of each log file, and return the number of bytes of the longest piece."""
        longest = 0
        for file in self._files:
            size = self._descriptors.size(file)
            if size <= (file.offset if file.shipped else file.seen):
                continue
            descriptor = self._descriptors.get(file)
            if descriptor is None:
                continue
            if file.shipped and self._uplink is not None and not file.kept:
                self._skip(file, descriptor, self._uplink)
            start = file.offset if file.shipped else max(file.seen, size - _TAIL_BYTES)
            data = os.pread(descriptor, frames.MAX_LOG, start)
            if not data:
                continue
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
                self._release(file, file.offset)
        return longest

    def _skip(self, file: _File, descriptor: int, uplink: Uplink) -> None:
        """If over :data:`MAX_LAG` bytes of a file are unsent, skip to the start of a line near the file's end."""
        size = self._descriptors.size(file)
        if size - file.offset <= MAX_LAG:
            return
        lines, offset = 0, file.offset
        while offset < size - _KEEP_OF_LAG:
            piece = os.pread(descriptor, min(1 << 20, size - _KEEP_OF_LAG - offset), offset)
            lines += piece.count(b"\n")
            offset += len(piece)
        rest = os.pread(descriptor, _KEEP_OF_LAG, offset)
        newline = rest.find(b"\n")
        if newline >= 0:
            lines, offset = lines + 1, offset + newline + 1
        self.seen += max(0, offset - file.seen)
        file.offset, file.seen = offset, max(file.seen, offset)
        uplink.send(Skipped(file.rank, file.stream, lines, offset))

    def _release(self, file: _File, until: int) -> None:
        """Free a file's disk space up to an offset. The file's size and all offsets stay the same (fallocate(2))."""
        size = until - file.released
        if size < _RELEASE_STEP or sys.platform != "linux" or (descriptor := self._descriptors.get(file)) is None:
            return
        where, length = ctypes.c_longlong(file.released), ctypes.c_longlong(size)
        # If the file system does not support this, the call has no effect, and no space is freed.
        ctypes.CDLL(None).fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, where, length)
        file.released = until
