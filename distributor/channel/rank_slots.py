"""Memory that a node's ranks share with its agent: each rank has a slot in which it reports how it ended.

A rank must be able to report its end even if the disk is full, if it can open no more files, if user code has changed
the root directory, or if the node's folder is gone. The memory for the report (the rank's *slot*) is therefore mapped
before user code runs, and a rank needs nothing else in order to report. Slots can be large, since each page of a slot
takes up memory only once it has been written.

Source: memfd_create(2), mmap(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

#: Number of bytes of a slot (the memory in which one rank reports how it ended), a multiple of the page size of every
#: machine.
SIZE = 4 << 20

#: The head of a slot: the number of bytes that follow.
_LENGTH = struct.Struct("=Q")

_MFD_CLOEXEC = 1  # memfd_create(2)

#: Number of bytes that a rank can write into its slot, after the head.
ROOM = SIZE - _LENGTH.size


class Slots:
    """The agent's view of a node's slots: shared memory in which each rank reports how it ended.

    Args:
        ranks: number of ranks of the node.

    Raises:
        OSError: memory is short, or the limit on the size of files (``ulimit -f``) is too low.
    """

    def __init__(self, ranks: int) -> None:
        self.descriptor = _memory("distributor-ranks")
        try:
            os.ftruncate(self.descriptor, ranks * SIZE)
        except OSError:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        os.close(self.descriptor)


def read(descriptor: int, local_rank: int) -> bytes | None:
    """Return what a rank has written into its slot; ``None`` if the rank has written nothing."""
    start = local_rank * SIZE
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, start))
    if not 0 < length <= ROOM:
        return None
    return os.pread(descriptor, length, start + _LENGTH.size)


def _memory(name: str) -> int:
    """Create anonymous memory that processes can share (memfd_create(2)), and return its file descriptor.

    Some builds of Python, such as conda's, were compiled with old headers and lack ``os.memfd_create``. On such a
    Python, this function calls the C library. ``name`` serves only to recognize the memory in /proc.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    descriptor = int(ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


class Slot:
    """A rank's view of its slot: shared memory in which the rank reports how it ended.

    Args:
        descriptor: the descriptor of the :class:`Slots`. It may be closed once this object exists.
        local_rank: the rank's local rank.
    """

    def __init__(self, descriptor: int, local_rank: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE, offset=local_rank * SIZE)
        self._owner = os.getpid()

    def write(self, data: bytes) -> bool:
        """Replace the contents of the rank's slot by ``data``.

        Returns:
            Whether the data was written. Data longer than :data:`ROOM` is not written, and a fork of the rank writes
            nothing.
        """
        if len(data) > ROOM or not self.is_mine:
            return False
        self._memory[: _LENGTH.size] = _LENGTH.pack(0)  # if the rank is killed meanwhile, the slot is empty
        self._memory[_LENGTH.size : _LENGTH.size + len(data)] = data
        self._memory[: _LENGTH.size] = _LENGTH.pack(len(data))
        return True

    @property
    def is_mine(self) -> bool:
        """Whether this process is the rank itself, and not a fork of it."""
        return os.getpid() == self._owner
