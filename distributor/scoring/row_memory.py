"""Memory of a task and the process that computes for it: the one writes arrays there, the other reads them in place.

It is an anonymous file, memfd_create(2), so it is not limited by the size of ``/dev/shm``, and ends with both.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from distributor.machine.shared_memory import memory_file

_ALIGNED = 64  # bytes: torch computes faster
_PIECE = 1 << 20  # bytes: the memory is so many times larger


class RowMemory:
    """One end of the memory. What is written is valid until the next writing."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def write(self, parts: Sequence[memoryview]) -> list[int]:
        """Write parts, and return the descriptor of the file if it is new: to send to the other end, and to close."""
        ends = _ends([part.nbytes for part in parts])
        opened: list[int] = []
        if self._memory is None or len(self._memory) < ends[-1]:
            opened = [memory_file("distributor")]
            os.ftruncate(opened[0], -(-ends[-1] // _PIECE) * _PIECE)
            self.open(opened[0])
        assert self._memory is not None
        for part, end in zip(parts, ends):
            self._memory[end - part.nbytes : end] = part
        return opened

    def open(self, descriptor: int) -> None:
        """Map the other end's file in place of the one before, which lives until nobody reads there."""
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)

    def read(self, lengths: Sequence[int]) -> list[memoryview]:
        """Return parts of these lengths, which may be changed."""
        assert self._memory is not None
        whole = memoryview(self._memory)
        return [whole[end - length : end] for length, end in zip(lengths, _ends(lengths))]


def _ends(lengths: Sequence[int]) -> list[int]:
    """Return where parts end, each of which begins at a multiple of :data:`_ALIGNED`."""
    ends, at = [], 0
    for length in lengths:
        at += length
        ends.append(at)
        at += -at % _ALIGNED
    return ends
