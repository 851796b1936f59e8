"""Adds the names and the code of notebook cells to tracebacks of ranks, which know IPython's file names only."""

from __future__ import annotations

import linecache
import re
import sys
from typing import Any

_FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<line>\d+)(?P<rest>.*)')


def readable(trace: str) -> str:
    """Return a traceback in which each frame of a notebook cell has the cell's name and the line of code."""
    lines = trace.splitlines()
    shown = []
    for line, after in zip(lines, [*lines[1:], ""]):
        frame = _FRAME.fullmatch(line)
        if frame is None or frame["path"] not in linecache.cache:
            shown.append(line)
            continue
        cell = name(frame["path"])
        shown.append(line if cell is None else f"  {cell}, line {frame['line']}{frame['rest']}")
        if not after.startswith("    "):
            shown.append(f"    {linecache.getline(frame['path'], int(frame['line'])).strip()}".rstrip())
    return "\n".join(shown)


def shell() -> Any:
    """Return the IPython shell that runs this code, if any. Never imports IPython."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def name(path: str) -> str | None:
    """Return IPython's name of a cell, such as ``Cell In[5]``; ``None`` if the path is no cell's."""
    try:
        kind, number = shell().compile.format_code_name(path)
    except Exception:  # there is no IPython, its version is too old, or the path belongs to a file
        return None
    return f"{kind} {number}" if kind == "Cell" else None
