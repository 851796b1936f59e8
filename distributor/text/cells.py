"""Adds to tracebacks of ranks what only the driver knows: the names of notebook cells, and lines of code."""

from __future__ import annotations

import linecache
import os
import re
import sys
from typing import Any

_FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<line>\d+)(?P<rest>.*)')


def readable(trace: str) -> str:
    """Return a traceback with the names of notebook cells, and the code of frames in cells and the driver's files."""
    lines = trace.splitlines()
    shown = []
    for line, after in zip(lines, [*lines[1:], ""]):
        frame = _FRAME.fullmatch(line)
        if frame is None or not _is_known(frame):
            shown.append(line)
            continue
        cell = name(frame["path"])
        shown.append(line if cell is None else f"  {cell}, line {frame['line']}{frame['rest']}")
        code = linecache.getline(frame["path"], int(frame["line"])).strip()
        if code and not after.startswith("    "):
            shown.append(f"    {code}")
    return "\n".join(shown)


def _is_known(frame: re.Match[str]) -> bool:
    """Return whether a frame is of a cell, or of a file here. Frames of files in stacks get no code."""
    path = frame["path"]
    return frame["rest"].startswith(", in ") if os.path.isfile(path) else path in linecache.cache


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
