"""Find out which files processes have open for writing (proc(5))."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

_FLAGS = re.compile(rb"^flags:\s*([0-7]+)", re.MULTILINE)


def written(pids: Iterable[int], folder: str) -> dict[str, int]:
    """Return the files below a folder that processes have open for writing, each with the pid of one such process.

    Args:
        pids: the processes; processes that have ended or belong to other users are left out.
        folder: the real path of the folder.
    """
    found: dict[str, int] = {}
    for pid in pids:
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if path.startswith(folder + os.sep) and _writes(pid, descriptor):
                    found[path] = pid
            except OSError:  # just closed
                continue
    return found


def _writes(pid: int, descriptor: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as about:
        flags = _FLAGS.search(about.read())
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
