"""Memory that processes share: made without a name, or left by ranks in files of ``/dev/shm``, and removed."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from contextlib import suppress

#: Names that Python, torch, NCCL, mosaicml-streaming, MPICH, UCX and Open MPI give. Other files may be users' data.
_NAMES = re.compile(
    r"psm_[0-9a-f]+|torch_\d+_\d+_\d+|nccl-\w+|\d{6}_\w+|mpich_shm_[0-9a-f]+_\d+|ucx_shm_posix_[0-9a-f]+|sm_segment\.[\w.-]+"
)

#: Where Linux keeps POSIX shared memory, shm_open(3).
FOLDER = "/dev/shm"  # noqa: S108

_MFD_CLOEXEC = 1  # memfd_create(2)


def memory_file(name: str) -> int:
    """Return a descriptor of a new file in memory, with a name for /proc.

    Some builds of Python, such as conda's, were compiled with old headers and lack ``os.memfd_create``.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    descriptor = int(ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


class Segments:
    """The shared-memory files that libraries create in a run's processes after this object was made."""

    def __init__(self) -> None:
        self._before = _names()
        self._found: set[str] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Record the files that the processes ``pids`` have mapped, except files that existed before this object."""
        self._found |= mapped(pids) - self._before

    def remove(self) -> None:
        """Remove the files that :meth:`look` has recorded, except those that a process still has mapped."""
        if self._found:
            for name in self._found - mapped(int(name) for name in os.listdir("/proc") if name.isdecimal()):
                unlink(name)
        self._found.clear()


def _names() -> set[str]:
    try:
        return set(os.listdir(FOLDER))
    except OSError:
        return set()


def mapped(pids: Iterable[int]) -> set[str]:
    """Return the names of files in ``/dev/shm`` that libraries have made, and that the given processes have mapped."""
    names = set()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
            for line in maps:
                name = line.rstrip("\n").partition(f" {FOLDER}/")[2]
                if _NAMES.fullmatch(name):
                    names.add(name)
    return names


def unlink(name: str) -> None:
    """Remove a shared-memory file, unless another process has removed it already."""
    with suppress(OSError):
        os.unlink(f"{FOLDER}/{name}")
