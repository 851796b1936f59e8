"""The ranks' output on the driver: whole lines, each with its rank and host; progress bars as one live line.

The thread that receives output splits it into lines, and another thread shows them. A slow or blocked display thus
holds up neither the channel nor the ranks. Lines that it cannot keep up with are skipped, and a note says so.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence

from distributor.display.folding import OVERHEAD, Fold, Key, _Entry
from distributor.display.screen import _CONTROL, Screen, can_redraw, coloured, is_terminal, output
from distributor.text.wording import ranges

#: Number of bytes after which an unfinished line is shown.
_MAX_LINE = 16 << 20

#: Number of bytes to show at a time. The last piece may exceed it, since pieces are not split.
_CHUNK = 256 << 10

#: Number of bytes that a display which is too slow still shows: of the end of a run, and of the end of each gap in a
#: stream.
_LAST = 64 << 10
_TAIL = 1 << 10

#: Used in place of a rank for the distributor's own lines.
_NOBODY = -1


#: Number of seconds that a line waits for equal lines of other ranks.
_FOLD_WAIT = 0.5

#: Number of seconds between rounds of showing output, unless much is waiting. What arrives between is shown together,
#: so a live line is redrawn no more often.
_REDRAW = 0.05

#: Number of seconds between lines that show the state of a progress bar if the output cannot be redrawn.
_BAR_LINES = 10.0


class Console:
    """Shows the ranks' lines, stdout on ``sys.stdout`` and stderr on ``sys.stderr``.

    Args:
        host_of: returns the host of a rank, for the prefix.
        ranks: the ranks whose lines are shown; ``None`` (default) for all.
        fold: show identical lines of several ranks once, ``[ranks 0-15] ...`` (default no). Lines wait for each other
            for at most half a second.
        world_size: the number of ranks (default 1). A line that all ranks have written does not wait any longer.
        prefix: begin each line with its rank and host (default). Without it, lines are shown as ranks wrote them.
        limit: number of bytes that may wait to be shown (default 8 MiB); what exceeds it is skipped.

    Example:
        >>> console = Console(lambda rank: "host-a")
        >>> console.write(3, 1, b"loss 0.5\\n")
        >>> console.close()
        [rank 3 host-a] loss 0.5
    """

    def __init__(
        self,
        host_of: Callable[[int], str],
        *,
        ranks: Collection[int] | None = None,
        fold: bool = False,
        world_size: int = 1,
        prefix: bool = True,
        limit: int = 8 << 20,
    ) -> None:
        self._host_of = host_of
        self._ranks = None if ranks is None else frozenset(ranks)
        self._prefixed = prefix
        self._limit = limit
        # Never held while output is shown: a caller of write() must not wait for the display.
        self._changed = threading.Condition()
        self._partial: dict[Key, bytearray] = {}
        self._live: set[Key] = set()  # the streams whose partial line is a progress bar
        self._queue: deque[tuple[Key, bytes]] = deque()
        self._queued = 0  # bytes, including those that are being shown
        self._behind = False
        self._gaps: dict[Key, Counter[str]] = {}  # number of skipped lines, by what was too slow
        self._tails: dict[Key, bytes] = {}  # the last of the lines skipped because of the display
        self._footer: tuple[str, ...] = ()
        self._news = False
        self._closing = False
        self._thread: threading.Thread | None = None
        # Used by the display thread only.
        self._fold = Fold(world_size if ranks is None else len(ranks), limit) if fold else None
        self._bars: dict[Key, tuple[float, bytes]] = {}  # when the next line is due, and the last one shown
        self._screen = Screen()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Take a piece of output. Never waits for the display.

        Args:
            rank: the rank that wrote it.
            stream: 1 for stdout, 2 for stderr.
            data: the bytes as the rank wrote them; a piece may begin and end anywhere in a line.
        """
        if not data or (self._ranks is not None and rank not in self._ranks):
            return
        key = (rank, stream)
        with self._changed:
            if self._closing:
                return
            partial = self._partial.setdefault(key, bytearray())
            ended, newline, rest = data.rpartition(b"\n")
            if newline:
                self._end_line(key, ended + newline)
            partial += rest
            if b"\r" in rest or key in self._live:
                self._live.add(key)
                self._wake()
                # Keep only the newest state of a bar: it may go on for days without a newline.
                del partial[: max(0, partial.rfind(b"\r", 0, len(partial.rstrip(b"\r"))))]
            if len(partial) >= _MAX_LINE:
                self._end_line(key, b"\n")

    def note(self, text: str) -> None:
        """Show a line of the distributor's own on stderr.

        Args:
            text: the line, without a newline.
        """
        with self._changed:
            if not self._closing:
                self._queue.append(((_NOBODY, 2), text.encode() + b"\n"))
                self._queued += len(text) + OVERHEAD
                self._wake()

    def footer(self, lines: Sequence[str]) -> None:
        """Keep lines below the log if stderr is a terminal, until the next call replaces or removes them.

        Args:
            lines: the lines, no longer than the terminal is wide. They may have colours.
        """
        with self._changed:
            if tuple(lines) != self._footer and not self._closing:
                self._footer = tuple(lines)
                self._wake()

    def skipped(self, rank: int, stream: int, lines: int) -> None:
        """Record that a node has skipped lines of a rank, including the rest of an unfinished line.

        Args:
            rank: the rank that wrote them.
            stream: 1 for stdout, 2 for stderr.
            lines: number of skipped lines.
        """
        if self._ranks is not None and rank not in self._ranks:
            return
        with self._changed:
            self._partial.pop((rank, stream), None)
            self._tails.pop((rank, stream), None)
            self._live.discard((rank, stream))
            self._skip((rank, stream), "node", lines)

    def close(self, timeout: float = 10.0) -> None:
        """Show all remaining output, including unfinished lines. Later output is not shown.

        Args:
            timeout: number of seconds to wait for the display (default 10). A display that needs longer shows only the
                last lines. One that is blocked for longer shows them when it continues.
        """
        with self._changed:
            self._closing = True
            if self._partial or self._footer:
                self._footer = ()
                self._wake()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(0.7 * timeout)
            with self._changed:
                self._trim()
            self._thread.join(0.3 * timeout)

    def _trim(self) -> None:
        """Drop the output that waits to be shown, except its end and the distributor's own lines."""
        waiting, size = self._queue, 0
        self._queue = deque()
        while waiting:
            key, block = waiting.pop()
            size += len(block)
            if size <= _LAST or key[0] == _NOBODY:
                self._queue.appendleft((key, block))
            else:
                self._gaps.setdefault(key, Counter())["display"] += block.count(b"\n")
        for key in list(self._gaps):
            if gap := self._gap(key):
                self._queue.appendleft((key, gap))

    def _end_line(self, key: Key, rest: bytes) -> None:
        """Queue a partial line with ``rest``, its end and any lines that follow, if there is room; else skip them."""
        block = bytes(self._partial[key]) + rest
        self._partial[key].clear()
        self._live.discard(key)
        size = len(block) + OVERHEAD
        # Once behind, skip until half of the limit is free: one long gap reads better than many short ones.
        allowed = self._limit // 2 if self._behind else self._limit
        self._behind = self._queued > 0 and self._queued + size > allowed
        if self._behind:
            tail = self._tails.get(key, b"") + block[-_TAIL - 1 :]
            self._tails[key] = tail if len(tail) <= _TAIL else tail[-_TAIL:].partition(b"\n")[2]
            self._skip(key, "display", block.count(b"\n"))
            return
        self._queue.append((key, self._gap(key) + block))
        self._queued += size
        self._wake()

    def _skip(self, key: Key, fault: str, lines: int) -> None:
        self._gaps.setdefault(key, Counter())[fault] += lines
        self._wake()

    def _gap(self, key: Key) -> bytes:
        """Return a note on how many of a stream's lines were skipped, and the last of the skipped lines."""
        counts, tail = self._gaps.pop(key, Counter()), self._tails.pop(key, b"")
        counts["display"] -= tail.count(b"\n")
        told = b"".join(
            f"... {lines:,} line{'s' * (lines > 1)} skipped: the {fault} was behind\n".encode()
            for fault, lines in counts.items()
            if lines > 0
        )
        return told + tail

    def _wake(self) -> None:
        self._news = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._display, name="distributor-display", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _display(self) -> None:
        """Run the display thread."""
        ending = False
        while not ending:
            with self._changed:
                self._changed.wait_for(lambda: self._news or self._closing, self._idle_time())
                blocks, size = self._take()
                more = bool(self._queue)
                ending, self._news = self._closing and not more, more
                if not more:  # nothing else of these streams waits, so the order is kept
                    blocks += [(key, gap) for key in list(self._gaps) if (gap := self._gap(key))]
                if ending:
                    rest = sorted(self._partial.items())
                    blocks += [(key, bytes(line) + b"\n") for key, line in rest if line.strip(b"\r ")]
                    self._live.clear()
                bars = {key: bytes(self._partial[key]) for key in sorted(self._live)}
                footer = self._footer
            try:
                self._show(blocks, bars, footer, ending)
            except Exception:  # the next lines are shown even if host_of or the output fails
                pass
            with self._changed:
                self._queued -= size
                if not more:
                    self._changed.wait_for(lambda: self._closing or self._queued > self._limit // 4, _REDRAW)

    def _take(self) -> tuple[list[tuple[Key, bytes]], int]:
        """Take part of the queue, so that the rest can still be dropped; return it and the size that it counts for."""
        blocks, size = [], 0
        while self._queue and size < _CHUNK:
            blocks.append(self._queue.popleft())
            size += len(blocks[-1][1]) + OVERHEAD
        return blocks, size

    def _idle_time(self) -> float | None:
        """Return the number of seconds until output that has already arrived is due; ``None`` if there is none."""
        times = [time_ for time_, _ in self._bars.values()]
        if self._fold is not None and self._fold.entries:
            times.append(self._fold.entries[0].since + _FOLD_WAIT)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _show(
        self, blocks: list[tuple[Key, bytes]], bars: dict[Key, bytes], footer: tuple[str, ...], ending: bool
    ) -> None:
        for key, block in blocks:
            self._show_lines(key, block)
        live = self._show_bars(bars)
        if self._fold is not None:
            self._show_folded(self._fold.leave(float("inf") if ending else time.monotonic() - _FOLD_WAIT))
        if footer and is_terminal(output(2)):
            bar = "" if live is None else f"{self._bar_prefix(live[0])} {live[1]}".lstrip()
            self._screen.draw_block(output(2), _CONTROL.sub("", bar), footer)
        elif live is None:
            self._screen.erase()
        else:
            key, text = live
            self._screen.draw(output(key[1]), key[0], self._bar_prefix(key), text)
        self._screen.flush()

    def _show_lines(self, key: Key, block: bytes) -> None:
        rank, stream = key
        text = _newest(block).decode(errors="replace")[:-1]
        if self._fold is None or rank == _NOBODY:
            self._print(stream, [rank], text)
            return
        now = time.monotonic()
        for line in text.split("\n"):
            self._fold.add(rank, stream, line, now)
        self._show_folded(self._fold.leave(now - _FOLD_WAIT))

    def _show_bars(self, bars: dict[Key, bytes]) -> tuple[Key, str] | None:
        """Show progress bars as lines if the output cannot be redrawn; return the bar for the live line, if any."""
        live, now = None, time.monotonic()
        shown, self._bars = self._bars, {}
        for key, line in bars.items():
            text = _newest(line).decode(errors="replace")
            if can_redraw(output(key[1])):
                if live is None and text.strip():
                    live = (key, text)
                continue
            due, last = shown.get(key, (now + _BAR_LINES, b""))
            if due <= now:
                due = now + _BAR_LINES
                if line != last and text.strip():
                    self._show_lines(key, line + b"\n")
                    last = line
            self._bars[key] = (due, last)
        return live

    def _show_folded(self, entries: Iterator[_Entry]) -> None:
        for entry in entries:
            self._print(entry.stream, sorted(entry.ranks), entry.text)

    def _print(self, stream: int, ranks: list[int], text: str) -> None:
        """Print lines of one rank, or one line of several ranks."""
        out = output(stream)
        if not self._prefixed and ranks != [_NOBODY]:
            self._screen.print(out, text + "\n")
            return
        prefix = self._prefix(ranks)
        if len(ranks) == 1 and ranks != [_NOBODY]:
            prefix = coloured(out, ranks[0], prefix)
        prefix += " "
        self._screen.print(out, prefix + text.replace("\n", "\n" + prefix) + "\n")

    def _bar_prefix(self, key: Key) -> str:
        return self._prefix([key[0]]) if self._prefixed else ""

    def _prefix(self, ranks: list[int]) -> str:
        if ranks == [_NOBODY]:
            return "[distributor]"
        return f"[ranks {ranges(ranks)}]" if len(ranks) > 1 else f"[rank {ranks[0]} {self._host_of(ranks[0])}]"


def _newest(lines: bytes) -> bytes:
    """Return what a terminal would show of each line: the text after the last carriage return that text follows."""
    if b"\r" not in lines:
        return lines
    return b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines.split(b"\n"))
