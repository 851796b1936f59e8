"""Shows the ranks' output on the driver: whole lines, each with its rank and host, and a progress bar below them.

One thread receives output, another shows it: a slow or blocked display holds up neither nodes nor ranks. If it cannot
keep up, lines are skipped, and a note says how many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from distributor.display.backlog import Backlog
from distributor.display.folding import Fold
from distributor.display.printer import Printer

#: Seconds between two rounds of output or drawings of a bar, unless much output waits.
_REDRAW = 0.05


class Console:
    """Shows the ranks' stdout on ``sys.stdout``, and their stderr on ``sys.stderr``.

    With ``fold``, a line waits half a second for that of other ranks. At most ``limit`` bytes wait, others are skipped.

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
        escapes: bool = False,
        limit: int = 8 << 20,
    ) -> None:
        self._ranks = None if ranks is None else frozenset(ranks)
        # The lock is never held while output is shown, since a caller of write() must not wait for the display.
        self._changed = threading.Condition()
        self._backlog = Backlog(limit)
        self._footer: tuple[str, ...] = ()
        self._drawn_footer: tuple[str, ...] = ()
        self._news = False
        self._closing = False
        self._thread: threading.Thread | None = None
        folded = Fold(world_size if ranks is None else len(ranks), limit) if fold else None
        self._printer = Printer(host_of, prefix=prefix, fold=folded, all_escapes=escapes)

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Take a piece of a rank's output, which may begin and end anywhere in a line, and do not wait."""
        if not data or (self._ranks is not None and rank not in self._ranks):
            return
        with self._changed:
            if not self._closing and self._backlog.write((rank, stream), data):
                self._wake()

    def note(self, text: str) -> None:
        """Show a line on stderr that comes from this package and not from a rank."""
        with self._changed:
            if not self._closing:
                self._backlog.note(text)
                self._wake()

    def end_lines(self) -> None:
        """Show unfinished lines as they are: other ranks write what comes next."""
        with self._changed:
            if not self._closing and self._backlog.unfinished:
                self._backlog.end_lines()
                self._wake()

    def footer(self, lines: Sequence[str]) -> None:
        """Show lines no wider than the terminal below all output if stderr is one, in place of the previous ones."""
        with self._changed:
            if tuple(lines) != self._footer and not self._closing:
                self._footer = tuple(lines)
                self._wake()

    @property
    def has_footer(self) -> bool:
        """Whether there are lines below the output, or will be."""
        return bool(self._footer or self._drawn_footer)

    def await_footer(self, timeout: float) -> None:
        """Wait until the newest lines below the output are drawn, or erased."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._drawn_footer == self._footer, timeout)

    def skipped(self, rank: int, stream: int, lines: int) -> None:
        """Record that a node has skipped lines of a rank, including the rest of an unfinished line."""
        if self._ranks is not None and rank not in self._ranks:
            return
        with self._changed:
            self._backlog.skipped((rank, stream), lines)
            self._wake()

    def close(self, timeout: float = 10.0) -> None:
        """Show all remaining output, including unfinished lines, but only the end if the display is too slow.

        If it is blocked after ``timeout`` seconds, such as by a full pipe, the last lines are shown when it goes on.
        """
        with self._changed:
            self._closing = True
            if self._backlog.unfinished or self._footer:
                self._footer = ()
                self._wake()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(0.7 * timeout)
            with self._changed:
                self._backlog.trim()
            self._thread.join(0.3 * timeout)

    def _wake(self) -> None:
        self._news = True
        if self._thread is None:
            thread = threading.Thread(target=self._display, name="distributor-display", daemon=True)
            with suppress(RuntimeError):  # no further thread can be started: the next output tries again
                thread.start()
                self._thread = thread
        self._changed.notify_all()

    def _display(self) -> None:
        """Show output until the console is closed. Runs in the display thread."""
        ending, backlog = False, self._backlog
        while not ending:
            with self._changed:
                self._changed.wait_for(lambda: self._news or self._closing, self._printer.idle_time())
                blocks, size = backlog.take()
                more = bool(backlog)
                ending, self._news = self._closing and not more, more
                if ending:
                    blocks += backlog.finish()
                bars, footer = backlog.bars(), self._footer
            try:
                self._printer.show(blocks, bars, footer, ending=ending)
            except Exception:  # the next lines are shown even if host_of or the output fails
                pass
            with self._changed:
                backlog.size -= size
                self._drawn_footer = footer
                self._changed.notify_all()
                if not more:
                    self._changed.wait_for(lambda: self._closing or backlog.crowded, _REDRAW)
