"""Tracebacks with the names and lines of a notebook's cells, which only the driver knows."""

from __future__ import annotations

import linecache
import re
import sys
from typing import Any

_FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<line>\d+)(?P<rest>.*)')


def readable(trace: str) -> str:
    """A traceback as text, in which each frame of a cell has the cell's name and its line of code.

    Ranks know a cell by the file name under which IPython compiled it, and nothing else of it.

    Args:
        trace: as ``traceback.format_exception`` has it.
    """
    lines = trace.splitlines()
    told = []
    for line, after in zip(lines, [*lines[1:], ""]):
        frame = _FRAME.fullmatch(line)
        if frame is None or frame["path"] not in linecache.cache:
            told.append(line)
            continue
        cell = _cell(frame["path"])
        told.append(line if cell is None else f"  {cell}, line {frame['line']}{frame['rest']}")
        if not after.startswith("    "):
            told.append(f"    {linecache.getline(frame['path'], int(frame['line'])).strip()}".rstrip())
    return "\n".join(told)


def shell() -> Any:
    """The IPython that runs this code, in a notebook or a terminal; ``None`` if there is none. Never imports it."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def _cell(path: str) -> str | None:
    """What IPython calls a cell: ``Cell In[5]``."""
    try:
        kind, name = shell().compile.format_code_name(path)
    except Exception:  # no IPython, an older one, or a file
        return None
    return f"{kind} {name}" if kind == "Cell" else None
