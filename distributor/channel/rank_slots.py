"""Memory that a node's ranks share with its agent: each rank has a *slot* in which it reports how it ended.

It is mapped before user code runs, so that a rank can report with a full disk, no free descriptors, another root
directory or without the node's folder. A page takes up memory only once it is written: memfd_create(2), mmap(2).
"""

from __future__ import annotations

import mmap
import os
import struct

from distributor.machine.shared_memory import memory_file

SIZE = 4 << 20  # bytes of a slot, a multiple of every machine's page size

_LENGTH = struct.Struct("=Q")  # the head of a slot: the number of bytes that follow

ROOM = SIZE - _LENGTH.size  # bytes that a rank can write after the head

_WRITING = (1 << 64) - 1  # the head of a slot while the rank writes

_TRIES = 10  # reads of a slot that changes meanwhile


class RankSlots:
    """The agent's view of a node's slots. OSError if memory is short or ``ulimit -f`` too low."""

    def __init__(self, ranks: int) -> None:
        self.descriptor = memory_file("distributor-ranks")
        try:
            os.ftruncate(self.descriptor, ranks * SIZE)
        except OSError:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        os.close(self.descriptor)


def read(descriptor: int, local_rank: int) -> bytes | None:
    """Return what a rank has written; ``None`` if nothing, and ``b""`` if it is writing now."""
    start, before = local_rank * SIZE, b""
    for _ in range(_TRIES):
        (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, start))
        if not length:
            return None
        said = os.pread(descriptor, length, start + _LENGTH.size) if length <= ROOM else b""
        if said and said == before:  # otherwise the rank may have written between the two reads
            return said
        before = said
    return b""


class Slot:
    """A rank's view of its slot. The descriptor may be closed once this object exists."""

    def __init__(self, descriptor: int, local_rank: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE, offset=local_rank * SIZE)
        self._owner = os.getpid()

    def write(self, data: bytes) -> bool:
        """Replace the contents. ``False`` if ``data`` is longer than :data:`ROOM`, or this is a fork of the rank."""
        if len(data) > ROOM or not self.is_mine:
            return False
        self._memory[: _LENGTH.size] = _LENGTH.pack(_WRITING)  # and remains so if the rank is killed meanwhile
        self._memory[_LENGTH.size : _LENGTH.size + len(data)] = data
        self._memory[: _LENGTH.size] = _LENGTH.pack(len(data))
        return True

    @property
    def is_mine(self) -> bool:
        return os.getpid() == self._owner
