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
    """Return the files below a folder's real path that processes have open for writing, each with one of the pids."""
    return {path: pid for pid in pids for path, _ in _open(pid, folder + os.sep)}


class FileState(NamedTuple):
    """The size of a file in bytes, and the time of its last change in nanoseconds since the epoch."""

    size: int
    mtime_ns: int


def regular(pid: int, apart: str) -> dict[str, FileState]:
    """Return the regular files that a process has open for writing, except removed files and files in ``/dev``."""
    files: dict[str, FileState] = {}
    for path, descriptor in _open(pid):
        with suppress(OSError):  # the file was just closed
            status = os.stat(descriptor)
            # ``apart`` is a real path, such as that of the node's private folder.
            if stat.S_ISREG(status.st_mode) and status.st_nlink and not path.startswith((apart + os.sep, "/dev/")):
                files[path] = FileState(status.st_size, status.st_mtime_ns)
    return files


def _open(pid: int, begin: str = "") -> Iterator[tuple[str, str]]:
    """Yield paths that ``begin`` so, and the descriptors' paths, of files that a process has open for writing."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # the file was just closed
                path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if not path.startswith(begin):
                    continue
                with open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as info:
                    flags = _FLAGS.search(info.read())
                if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    yield path, f"/proc/{pid}/fd/{descriptor}"
