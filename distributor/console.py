"""The ranks' output on the driver: whole lines, each with its rank and host; progress bars as one live line.

Lines are cut where they arrive and shown by a thread of their own, so that a slow or blocked display holds up neither
the channel nor the ranks. What it cannot take is skipped, and said to be.
"""

from __future__ import annotations

import bisect
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from distributor.stacks import ranges

#: Bytes of a line that is shown before its end has come.
_MAX_LINE = 16 << 20

#: Seconds that a line waits for its equals of other ranks.
_FOLD_WAIT = 0.5

#: Seconds between redraws of a live line.
_REDRAW = 0.05

#: Seconds between lines that show the state of a progress bar where nothing can be redrawn.
_BAR_LINES = 10.0

_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red

Key = tuple[int, int]  # rank, stream


@dataclass
class _Block:
    """Whole lines of one rank, or how many of its lines there are none of."""

    key: Key
    lines: bytes = b""
    skipped: int = 0


class Console:
    """Shows the ranks' lines, stdout on stdout and stderr on stderr.

    Args:
        host_of: the host of a rank, for the prefix.
        ranks: whose lines are shown; ``None`` for all.
        fold: shows identical lines of several ranks once, ``[ranks 0-15] ...``.
        world_size: how many ranks there are: a line that all have said does not wait for more.
        limit: bytes that may wait to be shown (default 8 MiB).

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
        limit: int = 8 << 20,
    ) -> None:
        self._host_of = host_of
        self._ranks = ranks
        self._fold = _Fold(world_size if ranks is None else len(ranks)) if fold else None
        self._limit = limit
        self._changed = threading.Condition()
        self._partial: dict[Key, bytearray] = {}
        self._bars: dict[Key, bytes] = {}  # unfinished lines that redraw themselves, as they are now
        self._bars_changed = False
        self._queue: deque[_Block] = deque()
        self._waiting = 0
        self._dropped: dict[Key, int] = {}
        self._closing = False
        self._thread: threading.Thread | None = None
        self._screen = _Screen()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Takes a piece of a rank's output (stream 1 stdout, 2 stderr). Never waits for the display."""
        if self._ranks is not None and rank not in self._ranks:
            return
        key = (rank, stream)
        with self._changed:
            partial = self._partial.setdefault(key, bytearray())
            whole, newline, rest = data.rpartition(b"\n")
            if newline:
                self._put(_Block(key, bytes(partial) + whole + newline))
                partial.clear()
                self._bars.pop(key, None)
            partial += rest
            self._note_bar(key, partial)
            if len(partial) > _MAX_LINE:
                self._put(_Block(key, bytes(partial) + b"\n"))
                partial.clear()
            self._wake()

    def skipped(self, rank: int, stream: int, lines: int) -> None:
        """Takes note that so many lines of a rank will not come."""
        if self._ranks is not None and rank not in self._ranks:
            return
        with self._changed:
            self._partial.pop((rank, stream), None)
            self._bars.pop((rank, stream), None)
            self._queue.append(_Block((rank, stream), skipped=lines))
            self._wake()

    def close(self, timeout: float = 10.0) -> None:
        """Shows all that is left, unfinished lines too, and waits for it so many seconds at most."""
        with self._changed:
            for key, partial in sorted(self._partial.items()):
                if partial:
                    self._put(_Block(key, bytes(partial) + b"\n"))
            self._partial.clear()
            self._bars.clear()
            for key in list(self._dropped):
                self._queue.append(_Block(key, skipped=self._dropped.pop(key)))
            if self._queue:
                self._wake()
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def _note_bar(self, key: Key, partial: bytearray) -> None:
        """Keeps of a line that redraws itself only what it shows now."""
        end = len(partial.rstrip(b"\r"))
        start = partial.rfind(b"\r", 0, end)
        if start >= 0:
            del partial[: start + 1]
            end -= start + 1
        if start >= 0 or end < len(partial) or key in self._bars:
            self._bars[key] = bytes(partial[:end])
            self._bars_changed = True

    def _put(self, block: _Block) -> None:
        if self._waiting + len(block.lines) > self._limit and self._waiting:
            self._dropped[block.key] = self._dropped.get(block.key, 0) + block.lines.count(b"\n")
            return
        if block.key in self._dropped:
            self._queue.append(_Block(block.key, skipped=self._dropped.pop(block.key)))
        self._queue.append(block)
        self._waiting += len(block.lines)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._display, name="distributor-display", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _display(self) -> None:
        """The display's thread."""
        while True:
            with self._changed:
                if not self._queue and not self._bars_changed and not self._closing:
                    self._changed.wait(_FOLD_WAIT / 5 if self._fold else None)
                blocks, bars = list(self._queue), dict(self._bars)
                self._queue.clear()
                ending, self._bars_changed = self._closing, False
            for block in blocks:
                self._show(block)
                with self._changed:
                    self._waiting -= len(block.lines)
            if self._fold:
                for stream, text, ranks in self._fold.leaving(time.monotonic(), everything=ending):
                    self._screen.print(stream, self._prefixed(ranks, stream, text + "\n"))
            self._screen.draw({key: (self._prefix([key[0]], key[1]), bar) for key, bar in bars.items()})
            if ending and not blocks:
                return
            if bars and not blocks:
                time.sleep(_REDRAW)  # thins redraws out

    def _show(self, block: _Block) -> None:
        rank, stream = block.key
        if block.skipped:
            text = f"... {block.skipped:,} lines skipped: the display was behind\n"
        else:
            text = block.lines.decode(errors="replace")
            if "\r" in text:
                text = "".join(f"{line.rstrip(chr(13)).rpartition(chr(13))[2]}\n" for line in text.split("\n")[:-1])
        if self._fold is None:
            self._screen.print(stream, self._prefixed([rank], stream, text))
            return
        for line in text.split("\n")[:-1]:
            self._fold.add(rank, stream, line, time.monotonic())

    def _prefixed(self, ranks: list[int], stream: int, text: str) -> str:
        prefix = self._prefix(ranks, stream)
        return f"{prefix}{text[:-1].replace(chr(10), chr(10) + prefix)}\n"

    def _prefix(self, ranks: list[int], stream: int) -> str:
        if len(ranks) > 1:
            return f"[ranks {ranges(sorted(ranks))}] "
        (rank,) = ranks
        prefix = f"[rank {rank} {self._host_of(rank)}]"
        if _is_terminal(_out(stream)) and not os.environ.get("NO_COLOR"):
            return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m "
        return f"{prefix} "


class _Fold:
    """Lines that wait for their equals. Each rank's own lines keep their order: an entry is joined only after the
    rank's last one, and entries leave from the front.
    """

    def __init__(self, all_ranks: int) -> None:
        self._all = all_ranks
        self._entries: deque[tuple[int, str, list[int], float]] = deque()
        self._first = 0  # number of the entry at the front
        self._numbers: dict[tuple[int, str], list[int]] = {}
        self._last: dict[Key, int] = {}

    def add(self, rank: int, stream: int, text: str, now: float) -> None:
        numbers = self._numbers.setdefault((stream, text), [])
        at = bisect.bisect_right(numbers, self._last.get((rank, stream), -1))
        if at < len(numbers):
            number = numbers[at]
            self._entries[number - self._first][2].append(rank)
        else:
            number = self._first + len(self._entries)
            self._entries.append((stream, text, [rank], now))
            numbers.append(number)
        self._last[rank, stream] = number

    def leaving(self, now: float, everything: bool) -> Iterator[tuple[int, str, list[int]]]:
        """The entries whose time has come."""
        while self._entries:
            stream, text, ranks, born = self._entries[0]
            if not everything and len(ranks) < self._all and now - born < _FOLD_WAIT:
                return
            self._entries.popleft()
            self._first += 1
            numbers = self._numbers[stream, text]
            del numbers[0]
            if not numbers:
                del self._numbers[stream, text]
            yield stream, text, ranks


class _Screen:
    """Where lines are printed, with one live line below them where the output can be redrawn."""

    def __init__(self) -> None:
        self._live: tuple[int, str] | None = None  # stream and text that are drawn now
        self._said: dict[Key, tuple[float, bytes]] = {}

    def print(self, stream: int, text: str) -> None:
        self._erase()
        _write(stream, text)

    def draw(self, bars: dict[Key, tuple[str, bytes]]) -> None:
        """Shows the state of progress bars: the lowest rank's live, or each now and then as a line."""
        live = [key for key in sorted(bars) if _can_redraw(_out(key[1]))]
        if live:
            prefix, bar = bars[live[0]]
            text = bar.decode(errors="replace")
            width = shutil.get_terminal_size().columns - 1 - len(prefix)
            drawn = (live[0][1], prefix + text[: max(10, width)])
            if drawn != self._live:
                self._erase()
                _write(drawn[0], "\r" + drawn[1])
                self._live = drawn
        else:
            self._erase()
        now = time.monotonic()
        for key, (prefix, bar) in bars.items():
            since, said = self._said.setdefault(key, (now, bar))
            if key not in live and now - since >= _BAR_LINES and bar != said:
                self._said[key] = (now, bar)
                _write(key[1], f"{prefix}{bar.decode(errors='replace')}\n")
        for key in self._said.keys() - bars.keys():
            del self._said[key]

    def _erase(self) -> None:
        if self._live is not None:
            stream, text = self._live
            _write(stream, "\r\x1b[K" if _is_terminal(_out(stream)) else f"\r{' ' * len(text)}\r")
            self._live = None


def _out(stream: int) -> TextIO | None:
    """Looked up each time: notebooks and tests replace them. ``None`` where the shell closed it."""
    return sys.stdout if stream == 1 else sys.stderr


def _is_terminal(out: TextIO | None) -> bool:
    try:
        return out is not None and out.isatty()
    except Exception:  # closed, or no file at all
        return False


def _can_redraw(out: TextIO | None) -> bool:
    return _is_terminal(out) or type(out).__module__.startswith("ipykernel")


def _write(stream: int, text: str) -> None:
    out = _out(stream)
    if out is None:
        return
    with suppress(Exception):  # a closed, full or odd output must not end the display
        try:
            out.write(text)
        except UnicodeEncodeError:
            encoding = out.encoding or "ascii"
            out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()
