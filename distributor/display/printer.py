"""Shows lines with their rank and host. A progress bar and the run's status stay below them, redrawn in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from distributor.display.backlog import Blocks
from distributor.display.folding import NOBODY, Fold, Key, _Entry
from distributor.display.screen import Screen, can_redraw, coloured, is_terminal, output, unmoving
from distributor.text import escapes
from distributor.text.wording import ranges

#: Seconds that a line waits for equal lines of other ranks.
_FOLD_WAIT = 0.5

#: Seconds between lines with the state of a progress bar if the output cannot be redrawn.
_BAR_LINES = 10.0


class Printer:
    """Shows output on ``sys.stdout`` and ``sys.stderr``. Only one thread may use it, which a slow output blocks."""

    def __init__(self, host_of: Callable[[int], str], *, prefix: bool, fold: Fold | None, all_escapes: bool) -> None:
        self._host_of = host_of
        self._prefixed = prefix
        self._fold = fold
        self._all_escapes = all_escapes
        self._bars: dict[Key, tuple[float, bytes]] = {}  # when a bar is shown next as a line, and its last line
        self._screen = Screen()

    def idle_time(self) -> float | None:
        """Return the seconds until output that waits must be shown; ``None`` if none waits."""
        times = [time_ for time_, _ in self._bars.values()]
        if self._fold is not None and self._fold.entries:
            times.append(self._fold.entries[0].since + _FOLD_WAIT)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def show(self, blocks: Blocks, bars: dict[Key, bytes], footer: tuple[str, ...], *, ending: bool) -> None:
        """Show whole lines, the first progress bar and the footer below them and, if ``ending``, all that wait."""
        for key, block in blocks:
            self._show_lines(key, block)
        live = self._show_bars(bars)
        if self._fold is not None:
            self._show_folded(self._fold.leave(float("inf") if ending else time.monotonic() - _FOLD_WAIT))
        if footer and is_terminal(output(2)):
            bar = "" if live is None else f"{self._bar_prefix(live[0])} {live[1]}".lstrip()
            self._screen.draw_block(output(2), unmoving(bar), footer)
        elif live is None:
            self._screen.erase()
        else:
            key, text = live
            self._screen.draw(output(key[1]), key[0], self._bar_prefix(key), text)
        self._screen.flush()

    def _show_lines(self, key: Key, block: bytes) -> None:
        rank, stream = key
        text = _newest(block).decode(errors="replace")[:-1]
        if rank == NOBODY or not self._all_escapes:
            text = escapes.colours(text)
        if self._fold is None or rank == NOBODY:
            self._print(stream, [rank], text)
            return
        now = time.monotonic()
        for line in text.split("\n"):
            self._fold.add(rank, stream, line, now)
        self._show_folded(self._fold.leave(now - _FOLD_WAIT))

    def _show_bars(self, bars: dict[Key, bytes]) -> tuple[Key, str] | None:
        """Return the progress bar to draw, if any. If the output cannot be redrawn, show bars as lines at intervals."""
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
        out = output(stream)
        if not self._prefixed and ranks != [NOBODY]:
            self._screen.print(out, text + "\n")
            return
        prefix = self._prefix(ranks)
        if len(ranks) == 1 and ranks != [NOBODY]:
            prefix = coloured(out, ranks[0], prefix)
        prefix += " "
        self._screen.print(out, prefix + text.replace("\n", "\n" + prefix) + "\n")

    def _bar_prefix(self, key: Key) -> str:
        return self._prefix([key[0]]) if self._prefixed else ""

    def _prefix(self, ranks: list[int]) -> str:
        if ranks == [NOBODY]:
            return "[distributor]"
        return f"[ranks {ranges(ranks)}]" if len(ranks) > 1 else f"[rank {ranks[0]} {self._host_of(ranks[0])}]"


def _newest(lines: bytes) -> bytes:
    """Remove what a terminal would overwrite: in each line, the text before the last carriage return within it."""
    if b"\r" not in lines:
        return lines
    return b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines.split(b"\n"))
