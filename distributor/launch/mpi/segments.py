"""The shared memory of MPI, which MPICH and Open MPI remove only in ``MPI_Finalize``."""

from __future__ import annotations

from collections.abc import Iterable

from distributor.machine import shared_memory

_NAMES = ("mpich_shm_", "ucx_shm_posix_", "sm_segment.")  # prefixes in ``/dev/shm``


def mapped(pids: Iterable[int]) -> set[str]:
    """Return the names of the files by which these processes share memory."""
    return {name for name in shared_memory.mapped(pids) if name.startswith(_NAMES)}
