"""Prints lines to a terminal, a notebook or a file, with a live line below them if the output can be redrawn."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, TextIO

from distributor.text import escapes, tables

_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Screen:
    """Prints lines and, if the output can be redrawn, keeps a live line or block below them.

    Runs at the same time have a screen each, and share the terminal: each leaves the block of another below its lines.
    """

    _shared: ClassVar[list[Screen]] = []  # the screen that has drawn last, if what it has drawn is still there
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self) -> None:
        self._drawn: tuple[TextIO, str] | None = None
        self._printed: TextIO | None = None  # where the last line went
        self._unflushed: TextIO | None = None

    def print(self, out: TextIO | None, text: str) -> None:
        """Print whole lines, after erasing what is below them; the caller redraws what this screen has drawn."""
        with self._lock:
            other = next((each for each in self._shared if each is not self), None) if is_terminal(out) else None
            block = None if other is None else other._block()
            if other is not None:
                other.erase()
                other.flush()
            if self._drawn is not None and can_redraw(out):
                self.erase()
            self._write(out, text)
            self._printed = out
            if other is not None and block is not None:
                self.flush()
                other.draw_block(block[0], "", block[1])
                other.flush()

    def _block(self) -> tuple[TextIO, list[str]] | None:
        """Return the output and the lines of what is drawn, unless that is a single line."""
        if self._drawn is None or "\n" not in self._drawn[1]:
            return None
        return self._drawn[0], self._drawn[1].split("\n")[1:]

    def _note(self, drawn: tuple[TextIO, str] | None) -> None:
        self._drawn = drawn
        self._shared[:] = [] if drawn is None else [self]

    def draw(self, out: TextIO | None, rank: int, prefix: str, text: str) -> None:
        """Draw a rank's progress bar below the printed lines, in place of the previous one."""
        if out is None:
            return
        with self._lock:  # a cell joins only pieces of one stream that follow each other
            own = self._printed if is_notebook(out) and is_notebook(self._printed) else None
            self._draw(own or out, rank, prefix, text)

    def _draw(self, out: TextIO, rank: int, prefix: str, text: str) -> None:
        terminal = is_terminal(out)
        text = unmoving(f"{prefix} {text}" if prefix else text)
        with suppress(Exception):
            text = encodable(out, text)
        if terminal:  # a line that wraps could not be erased
            if any(each is not self and each._block() for each in self._shared):
                return  # it stays below the lines, and has one place for a bar: its own
            text = cut(text, size_of(out).columns - 1)
        if self._drawn == (out, text):
            return
        if self._drawn is not None and (self._drawn[0] is not out or "\n" in self._drawn[1]):
            self.erase()
        if terminal:
            start = text[: len(prefix)]
            self._write(out, f"\r{coloured(out, rank, start)}{text[len(start) :]}\x1b[K")
        else:
            self._write(out, "\r" + text.ljust(len(self._drawn[1]) if self._drawn else 0))
        self._note((out, text))

    def draw_block(self, out: TextIO | None, bar: str, footer: Sequence[str]) -> None:
        """Draw a progress bar and lines no wider than the terminal, in place of the previous block.

        The cursor stays on an empty line above them: what other code writes goes there, and is not erased.
        """
        lines = [cut(bar, size_of(out).columns - 1)] if bar else []
        text = "\n".join(["", *lines, *footer])
        with self._lock:
            if out is not None and self._drawn != (out, text):
                for each in [*self._shared, self]:
                    each.erase()
                    each.flush()
                self._write(out, f"{text}\r\x1b[{text.count(chr(10))}A")
                self._note((out, text))

    def erase(self) -> None:
        with self._lock:
            if self._drawn is None:
                return
            out, text = self._drawn
            wipe = "\x1b[J" if "\n" in text else "\x1b[K"
            self._write(out, f"\r{wipe}" if is_terminal(out) else f"\r{' ' * len(text)}\r")
            self._note(None)

    def flush(self) -> None:
        if self._unflushed is not None:
            with suppress(Exception):
                self._unflushed.flush()
            self._unflushed = None

    def _write(self, out: TextIO | None, text: str) -> None:
        if out is not self._unflushed:  # stdout and stderr may be the same terminal: keep their order
            self.flush()
        if out is not None:
            self._unflushed = out
            with suppress(Exception):  # a closed, full or unusual output must not end the display
                out.write(encodable(out, text))


def output(stream: int) -> TextIO | None:
    """Return the current ``sys.stdout`` (1) or ``sys.stderr`` (2), which notebooks and tests replace."""
    return sys.stdout if stream == 1 else sys.stderr


def is_terminal(out: TextIO | None) -> bool:
    """Return whether an output is a terminal, where lines can be redrawn and have colours."""
    if os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    try:
        return out is not None and not is_notebook(out) and out.isatty()
    except Exception:  # closed, or not a full file object
        return False


def size_of(out: TextIO | None) -> os.terminal_size:
    """Return how many columns and lines an output's terminal has: stdout may be a file where stderr is none."""
    columns, lines = 0, 0
    with suppress(Exception):  # no terminal, closed, or not a full file object
        columns, lines = os.get_terminal_size(out.fileno() if out is not None else 2)
    return shutil.get_terminal_size((columns or 80, lines or 24))


def can_redraw(out: TextIO | None) -> bool:
    """Return whether lines on an output can be redrawn."""
    return is_notebook(out) or is_terminal(out)


def is_notebook(out: TextIO | None) -> bool:
    """Return whether an output belongs to a notebook cell."""
    return type(out).__module__.startswith("ipykernel")


def coloured(out: TextIO | None, rank: int, text: str) -> str:
    """Return the text, in the rank's colour on a terminal unless ``NO_COLOR`` is set (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or not is_terminal(out):
        return text
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"


def unmoving(text: str) -> str:
    """Return the text without characters and escape sequences that move a terminal's cursor or change its colours."""
    return _CONTROL.sub("", escapes.plain(text))


def encodable(out: TextIO, text: str) -> str:
    """Return the text with ASCII escapes for the characters that the output cannot encode."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def cut(text: str, width: int) -> str:
    """Return the longest beginning of a text that fits into ``width`` columns of a terminal."""
    columns = 0
    for place, character in enumerate(text):
        columns += tables.width(character)
        if columns > width:
            return text[:place]
    return text
