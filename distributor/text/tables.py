"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns under their headings, the first one aligned left and all others right.

    >>> print(table(["stage", "GPU"], [["0", "16.0 GB"], ["3", "8 GB"]]))
    stage      GPU
    0      16.0 GB
    3         8 GB
    """
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
