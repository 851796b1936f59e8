"""The output that waits to be shown: whole lines in order, progress bars, and notes on skipped lines."""

from __future__ import annotations

from collections import Counter, deque

from distributor.display.folding import NOBODY, OVERHEAD, Key

#: Bytes after which an unfinished line is shown.
_MAX_LINE = 16 << 20

#: Bytes of all unfinished lines after which the longest is shown.
_MAX_LINES = 64 << 20

#: Bytes to show at a time, but for the last piece, which is not split.
_CHUNK = 256 << 10

#: Bytes that even a slow display shows: of the end of a run's output, and of each block of skipped lines.
_LAST = 64 << 10
_TAIL = 1 << 10

Blocks = list[tuple[Key, bytes]]


class Backlog:
    """Splits the ranks' output into lines and keeps up to ``limit`` bytes until they are shown. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._partial: dict[Key, bytearray] = {}
        self._partial_size = 0
        self._live: set[Key] = set()  # the streams whose partial line is a progress bar
        self._queue: deque[tuple[Key, bytes]] = deque()
        self._behind = False
        self._gaps: dict[Key, Counter[str]] = {}  # number of skipped lines, by what was too slow: node or display
        self._tails: dict[Key, bytes] = {}  # the last lines that were skipped because the display was too slow
        #: Number of bytes that wait, including those that are being shown.
        self.size = 0

    def __bool__(self) -> bool:
        """Return whether whole lines wait to be shown."""
        return bool(self._queue)

    @property
    def unfinished(self) -> bool:
        """Whether any stream may have an unfinished line: it had output, and no node skipped its lines since."""
        return bool(self._partial)

    @property
    def crowded(self) -> bool:
        """Whether output should be shown without further delay."""
        return self.size > self._limit // 4

    def write(self, key: Key, data: bytes) -> bool:
        """Take a piece of a rank's output and return whether there is anything new to show."""
        partial, news = self._partial.setdefault(key, bytearray()), False
        before = len(partial)
        ended, newline, rest = data.rpartition(b"\n")
        if newline:
            self._end_line(key, ended + newline)
            news = True
        partial += rest
        if b"\r" in rest or key in self._live:
            self._live.add(key)
            news = True
            # Keep only the newest state of a progress bar, which may go on for days without a newline.
            del partial[: max(0, partial.rfind(b"\r", 0, len(partial.rstrip(b"\r"))))]
        if len(partial) >= _MAX_LINE:
            self._end_line(key, b"\n")
            news = True
        self._partial_size += len(partial) - before
        while self._partial_size > _MAX_LINES:
            longest = max(self._partial, key=lambda stream: len(self._partial[stream]))
            self._partial_size -= len(self._partial[longest])
            self._end_line(longest, b"\n")
            news = True
        return news

    def note(self, text: str) -> None:
        self._add((NOBODY, 2), text.encode(errors="backslashreplace") + b"\n")  # paths may not be UTF-8

    def skipped(self, key: Key, lines: int) -> None:
        """Record that a node has skipped lines of a stream, including the rest of an unfinished line."""
        self._partial_size -= len(self._partial.pop(key, b""))
        self._tails.pop(key, None)
        self._live.discard(key)
        self._skip(key, "node", lines)

    def take(self) -> tuple[Blocks, int]:
        """Return the next lines and their size, which the caller must subtract from ``self.size`` once they are shown.

        A note on skipped lines comes just before the stream's next line or, without one, when nothing else waits.
        """
        blocks: Blocks = []
        size = 0
        while self._queue and size < _CHUNK:
            blocks.append(self._queue.popleft())
            size += len(blocks[-1][1]) + OVERHEAD
        if not self._queue:
            blocks += [(key, gap) for key in list(self._gaps) if (gap := self._gap(key))]
        return blocks, size

    def finish(self) -> Blocks:
        """Return all unfinished lines, including progress bars, as whole lines."""
        self._live.clear()
        return [(key, bytes(line) + b"\n") for key, line in sorted(self._partial.items()) if line.strip(b"\r ")]

    def bars(self) -> dict[Key, bytes]:
        """Return the current states of the progress bars."""
        return {key: bytes(self._partial[key]) for key in sorted(self._live)}

    def trim(self) -> None:
        """Drop the output that waits to be shown, except its end and the distributor's own lines."""
        waiting, size = self._queue, 0
        newest, self._queue = (self._gaps, self._tails), deque()
        self._gaps, self._tails = {}, {}
        while waiting:
            key, block = waiting.pop()
            size += len(block)
            if size <= _LAST or key[0] == NOBODY:
                self._queue.appendleft((key, block))
            else:
                self._gaps.setdefault(key, Counter())["display"] += block.count(b"\n")
        for key in list(self._gaps):
            if gap := self._gap(key):
                self._queue.appendleft((key, gap))
        self._gaps, self._tails = newest  # take() shows them after what waits

    def end_lines(self) -> None:
        """Queue all unfinished lines: what comes next begins a new one."""
        for key in [key for key, line in self._partial.items() if line.strip(b"\r ")]:
            self._partial_size -= len(self._partial[key])
            self._end_line(key, b"\n")

    def _end_line(self, key: Key, rest: bytes) -> None:
        """Queue an unfinished line and ``rest``, or skip them if there is no room."""
        block = bytes(self._partial[key]) + rest
        self._partial[key].clear()
        self._live.discard(key)
        # Once lines are skipped, skip all until half is free: one long gap reads better than many short ones.
        allowed = self._limit // 2 if self._behind else self._limit
        self._behind = self.size > 0 and self.size + len(block) + OVERHEAD > allowed
        if self._behind:
            tail = self._tails.get(key, b"") + block[-_TAIL - 1 :]
            self._tails[key] = tail if len(tail) <= _TAIL else tail[-_TAIL:].partition(b"\n")[2]
            self._skip(key, "display", block.count(b"\n"))
            return
        self._add(key, self._gap(key) + block)

    def _add(self, key: Key, block: bytes) -> None:
        self._queue.append((key, block))
        self.size += len(block) + OVERHEAD

    def _skip(self, key: Key, fault: str, lines: int) -> None:
        self._gaps.setdefault(key, Counter())[fault] += lines

    def _gap(self, key: Key) -> bytes:
        """Return a note on the skipped lines of a stream, followed by the last of them."""
        counts, tail = self._gaps.pop(key, Counter()), self._tails.pop(key, b"")
        counts["display"] -= tail.count(b"\n")
        notes = b"".join(
            f"... {lines:,} line{'s' * (lines > 1)} skipped: the {fault} could not keep up\n".encode()
            for fault, lines in counts.items()
            if lines > 0
        )
        return notes + tail
