"""On the driver: the ranks' output as it arrives, each byte once, to the console and to files if they are wanted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from distributor.display.console import Console
from distributor.values.outcome import UNCAUGHT, Log

_STDERR = 2
_NAMES = {1: "stdout", _STDERR: "stderr", UNCAUGHT: "stderr"}

#: Bytes of what Python prints of a rank's uncaught exception that are held to be shown; the file has all.
_MOST_HELD = 1 << 20

#: Bytes of a rank's last line that an error shows.
_LAST_LINE = 200


class Logs:
    """Takes pieces of the ranks' output, whatever way and however often they come.

    Args:
        console: shows the lines.
        folder: where every rank's whole output is kept (``rank-3.stdout``, ``rank-3.stderr``); ``None`` keeps none.
    """

    def __init__(self, console: Console, folder: Path | None = None) -> None:
        self._console = console
        self._folder = folder
        self._offsets: dict[tuple[int, int], int] = {}
        self._held: dict[int, bytes] = {}
        self._lock = threading.Lock()
        #: Why files are not complete: the first error in writing them.
        self.error: OSError | None = None
        #: The last line of each rank, for the text of an error.
        self.last_lines: dict[int, str] = {}

    def take(self, log: Log) -> None:
        """Takes a piece; what is known of it is left out, as after a break of the channel."""
        with self._lock:
            key = (log.rank, log.stream)
            expected = self._offsets.get(key, 0)
            data = log.data[max(0, expected - log.offset) :]
            if not data:
                return
            self._offsets[key] = log.offset + len(log.data)
            self._write(key, self._offsets[key] - len(data), data)
            if log.stream == UNCAUGHT:
                self._held[log.rank] = (self._held.get(log.rank, b"") + data)[-_MOST_HELD:]
            else:
                self._console.write(log.rank, log.stream, data)
            last = data[-_LAST_LINE:].replace(b"\r", b"\n").rstrip().rpartition(b"\n")[2]
            if last:
                self.last_lines[log.rank] = last.decode(errors="replace")

    def release(self, told: Iterable[int]) -> None:
        """Shows what Python has printed of uncaught exceptions, which waits for the end of the run.

        Args:
            told: ranks whose exception the error of the run tells: what it has is not shown twice.
        """
        with self._lock:
            for rank in sorted(self._held.keys() - set(told)):
                self._console.write(rank, _STDERR, self._held[rank])
            self._held.clear()

    def note(self, text: str) -> None:
        """Shows a line of the distributor's own."""
        self._console.note(text)

    def footer(self, lines: Sequence[str]) -> None:
        """Keeps lines below the log of a terminal."""
        self._console.footer(lines)

    def skip(self, rank: int, stream: int, lines: int, offset: int) -> None:
        """A node could not keep up with its rank: the next piece starts at ``offset``, so many lines later."""
        with self._lock:
            if offset > self._offsets.get((rank, stream), 0):
                self._offsets[rank, stream] = offset
                self._console.skipped(rank, stream, lines)

    def offsets(self, ranks: Iterable[int]) -> list[list[int]]:
        """How much is here: ``[rank, stream, bytes]`` for each stream of some ranks."""
        with self._lock:
            return [
                [rank, stream, self._offsets[rank, stream]]
                for rank in ranks
                for stream in _NAMES
                if (rank, stream) in self._offsets
            ]

    def close(self) -> None:
        """Shows what is left."""
        self._console.close()

    def _write(self, key: tuple[int, int], offset: int, data: bytes) -> None:
        if self._folder is None or self.error is not None:
            return
        rank, stream = key
        if _NAMES[stream] == "stderr":  # both its streams, in the order in which they come
            offset += self._offsets.get((rank, _STDERR if stream == UNCAUGHT else UNCAUGHT), 0)
        try:
            path = self._folder / f"rank-{rank}.{_NAMES[stream]}"
            # Opened each time: of large runs there may be more files than a process may have open.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                while data:
                    count = os.pwrite(descriptor, data, offset)
                    offset, data = offset + count, data[count:]
            finally:
                os.close(descriptor)
        except OSError as error:  # the disk is full: training goes on, and the user is told in the end
            self.error = error
