"""Memory that a node's ranks share with its agent: a slot for each rank, for its last words.

A rank must be able to say how it ended on a full disk, without descriptors, in another root directory, and after its
node's folder has gone. So the memory is mapped before user code runs, and needs nothing but itself after that. A page
of it takes memory once it has been written.

Source: memfd_create(2), mmap(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

#: Number of bytes of a slot, a multiple of the page size of every machine.
SIZE = 4 << 20

#: The number of bytes written, before them.
_LENGTH = struct.Struct("=Q")

_MFD_CLOEXEC = 1  # memfd_create(2)

#: Number of bytes that fit into a slot.
ROOM = SIZE - _LENGTH.size


class Slots:
    """The slots of a node's ranks, as the agent has them.

    Args:
        ranks: number of ranks.

    Raises:
        OSError: there is no memory, or the limit on the size of files (``ulimit -f``) does not allow it.
    """

    def __init__(self, ranks: int) -> None:
        self.descriptor = _memory("distributor-ranks")
        try:
            os.ftruncate(self.descriptor, ranks * SIZE)
        except OSError:
            os.close(self.descriptor)
            raise

    def read(self, local_rank: int) -> bytes | None:
        """Return what a rank has written; ``None`` if it has written nothing."""
        start = local_rank * SIZE
        (length,) = _LENGTH.unpack(os.pread(self.descriptor, _LENGTH.size, start))
        if not 0 < length <= ROOM:
            return None
        return os.pread(self.descriptor, length, start + _LENGTH.size)

    def close(self) -> None:
        os.close(self.descriptor)


def _memory(name: str) -> int:
    """Return a descriptor of memory. Python lacks the function if it was built against old headers, as conda's is."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    descriptor = int(ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


class Slot:
    """A rank's own slot.

    Args:
        descriptor: that of the :class:`Slots`; no longer needed afterwards.
        local_rank: the rank.
    """

    def __init__(self, descriptor: int, local_rank: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE, offset=local_rank * SIZE)
        self._owner = os.getpid()

    def write(self, data: bytes) -> bool:
        """Write into the slot, in place of what was written before.

        Returns:
            Whether it was written: not if it is longer than :data:`ROOM`, nor in a fork of the rank.
        """
        if len(data) > ROOM or not self.is_mine:
            return False
        self._memory[: _LENGTH.size] = _LENGTH.pack(0)  # a rank killed meanwhile has written nothing
        self._memory[_LENGTH.size : _LENGTH.size + len(data)] = data
        self._memory[: _LENGTH.size] = _LENGTH.pack(len(data))
        return True

    @property
    def is_mine(self) -> bool:
        """Whether this process is the rank, and not one that it has forked."""
        return os.getpid() == self._owner
