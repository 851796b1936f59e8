"""Finds out which files processes have open for writing (proc(5))."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

_FLAGS = re.compile(rb"^flags:\s*([0-7]+)", re.MULTILINE)


def written(pids: Iterable[int], folder: str) -> dict[str, int]:
    """Return the files below a folder that processes have open for writing, each with the pid of one such process.

    Args:
        pids: the processes; processes that have ended or belong to other users are left out.
        folder: the real path of the folder.
    """
    return {path: pid for pid in pids for path, _ in _open(pid) if path.startswith(folder + os.sep)}


class State(NamedTuple):
    """The size of a file in bytes, and the time of its last change in nanoseconds since the epoch."""

    size: int
    mtime_ns: int


def regular(pid: int, apart: str) -> dict[str, State]:
    """Return the regular files that a process has open for writing, except removed files and files in ``/dev``.

    Args:
        pid: the process. If it has ended, the result is empty.
        apart: the real path (without symbolic links) of a folder, such as the node's private folder. The result leaves
            out all files below this folder.
    """
    found: dict[str, State] = {}
    for path, descriptor in _open(pid):
        with suppress(OSError):  # the file was just closed
            about = os.stat(descriptor)
            if stat.S_ISREG(about.st_mode) and about.st_nlink and not path.startswith((apart + os.sep, "/dev/")):
                found[path] = State(about.st_size, about.st_mtime_ns)
    return found


def _open(pid: int) -> Iterator[tuple[str, str]]:
    """For each file that a process has open for writing, yield the file's path and the path of its descriptor.

    Yield nothing if the process has ended or belongs to another user.
    """
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # the file was just closed
                path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if _writes(pid, descriptor):
                    yield path, f"/proc/{pid}/fd/{descriptor}"


def _writes(pid: int, descriptor: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as about:
        flags = _FLAGS.search(about.read())
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
