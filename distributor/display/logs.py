"""Passes each byte of the ranks' output once to the console and, if wanted, to files on the driver."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from distributor.display.console import Console
from distributor.display.log_files import LogFiles
from distributor.text import escapes
from distributor.values.messages import Offset
from distributor.values.outcome import UNCAUGHT, Log

_STDERR = 2
_NAMES = {1: "stdout", _STDERR: "stderr", UNCAUGHT: "stderr"}

#: Of the text for an uncaught exception, which is held back, at most so many last bytes are kept. The file gets all.
_MOST_HELD = 1 << 20

#: Characters of a rank's last line that views and errors show.
_LAST_LINE = 200

#: Bytes at the end of a piece that are searched for the last line.
_RECENT = 64 << 10


class Logs:
    """Receives the ranks' output, perhaps twice, for the console and for files in ``folder`` (``rank-3.stdout``)."""

    def __init__(self, console: Console, folder: Path | None = None) -> None:
        self._console = console
        self._files = None if folder is None else LogFiles(folder)
        self._offsets: dict[tuple[int, int], int] = {}
        self._before: dict[tuple[int, int], int] = {}  # number of bytes of each stream in the run's earlier jobs
        self._held: dict[int, bytes] = {}
        self._open: dict[tuple[int, int], str] = {}  # unfinished escape sequences, which the next piece continues
        self._lock = threading.Lock()
        #: The last line of each rank, for views and errors. It may have colours, as escape sequences.
        self.last_lines: dict[int, str] = {}

    def take(self, log: Log) -> None:
        """Take a piece of a rank's output, without the bytes that have arrived before."""
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
            self._note_last_line(key, data)

    def release(self, explained: Iterable[int]) -> None:
        """Show the texts for uncaught exceptions at the attempt's end, except of ``explained`` ranks."""
        with self._lock:
            self._console.end_lines()
            for rank in sorted(self._held.keys() - set(explained)):
                self._console.write(rank, _STDERR, self._held[rank])
            self._held.clear()

    def begin_again(self) -> None:
        """Prepare for the run's next job, whose ranks write new streams. Log files continue with the new output."""
        with self._lock:
            for key, offset in self._offsets.items():
                self._before[key] = self._before.get(key, 0) + offset
            self._offsets.clear()
            self._open.clear()
            self.last_lines.clear()

    def note(self, text: str) -> None:
        """Show a line that comes from this package and not from a rank."""
        self._console.note(text)

    def footer(self, lines: Sequence[str]) -> None:
        """Show lines, such as the run's status, below all output if stderr is a terminal."""
        self._console.footer(lines)

    @property
    def has_footer(self) -> bool:
        """Whether lines of :meth:`footer` are shown, or will be."""
        return self._console.has_footer

    def await_footer(self, timeout: float) -> None:
        """Wait until the newest lines of :meth:`footer` are drawn, or erased."""
        self._console.await_footer(timeout)

    def skip(self, rank: int, stream: int, lines: int, offset: int) -> None:
        """Record that a node left out lines that it could not send in time; output goes on at ``offset``."""
        with self._lock:
            if offset > self._offsets.get((rank, stream), 0):
                self._offsets[rank, stream] = offset
                self._console.skipped(rank, stream, lines)

    def received(self, rank: int, stream: int) -> int:
        """Return how many bytes of a rank's stream have arrived."""
        with self._lock:
            return self._offsets.get((rank, stream), 0)

    def offsets(self, ranks: Iterable[int]) -> tuple[Offset, ...]:
        """Return how many bytes of each stream of the given ranks have arrived."""
        with self._lock:
            return tuple(
                (rank, stream, self._offsets[rank, stream])
                for rank in ranks
                for stream in _NAMES
                if (rank, stream) in self._offsets
            )

    @property
    def incomplete(self) -> str:
        """Which files are incomplete, and why; ``""`` if none are."""
        files = self._files
        return "" if files is None or files.error is None else f"{files.folder} are incomplete: {files.error}"

    def flush(self) -> None:
        """Wait until the files have all output that has arrived."""
        if self._files is not None:
            self._files.flush()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
        self._console.close()

    def _note_last_line(self, key: tuple[int, int], data: bytes) -> None:
        start = data.rfind(b"\n", 0, max(0, len(data) - _RECENT)) + 1
        before = self._open.pop(key, "")
        text = ("" if start else before) + data[start:].decode(errors="replace")
        if open_end := escapes.open_end(text):
            self._open[key] = open_end
        last = escapes.colours(text).replace("\r", "\n").rstrip().rpartition("\n")[2]
        if escapes.plain(last).strip():
            self.last_lines[key[0]] = escapes.end_of(last, _LAST_LINE)

    def _write(self, key: tuple[int, int], offset: int, data: bytes) -> None:
        if self._files is None:
            return
        rank, stream = key
        offset += self._before.get(key, 0)
        if _NAMES[stream] == "stderr":  # the file takes stderr and UNCAUGHT, in the order in which they arrive
            other = (rank, _STDERR if stream == UNCAUGHT else UNCAUGHT)
            offset += self._before.get(other, 0) + self._offsets.get(other, 0)
        self._files.write(f"rank-{rank}.{_NAMES[stream]}", offset, data)
