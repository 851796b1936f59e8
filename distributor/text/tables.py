"""Tables as text."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns under their headings, the first one aligned left and all others right.

    >>> print(table(["stage", "GPU"], [["0", "16.0 GB"], ["3", "8 GB"]]))
    stage      GPU
    0      16.0 GB
    3         8 GB
    """
    widths = [max(map(width, column)) for column in zip(head, *rows)]
    lines = []
    for row in [head, *rows]:
        blanks = [" " * (most - width(cell)) for cell, most in zip(row, widths)]
        cells = [row[0] + blanks[0], *(blank + cell for cell, blank in zip(row[1:], blanks[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def width(text: str) -> int:
    """Return how many columns of a terminal a text takes: characters of East Asia take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
