"""How a rank joins MPI at its start, and leaves it at its end."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any

from distributor.launch.mpi import segments
from distributor.launch.mpi.environ import variables
from distributor.machine import processes, shared_memory
from distributor.machine.imports import around_import, on_import

_MOST = 1 << 16  # bytes of a place


def join(line: str, world_size: int, beside: int, folder: str, local_rank: int) -> None:
    """Prepare this rank for ``MPI_Init`` with its place.

    ``beside`` is the number of the run's ranks on this host, ``folder`` the node's private one.
    """
    companion = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    companion.connect(f"\0{line}")
    companion.send(str(local_rank).encode())
    place, descriptors, _, _ = socket.recv_fds(companion, _MOST, 1)
    threading.Thread(target=_await_abort, args=(companion,), daemon=True).start()
    os.environ.update({**json.loads(place), **({"PMI_FD": str(descriptors[0])} if descriptors else {})})
    kind = "mpich" if descriptors else "openmpi"
    os.environ.update(variables(os.environ, kind, crowded=beside > processes.cpu_count()))
    around_import("mpi4py.MPI", lambda _: _temporary_files(folder))  # it initializes MPI
    on_import("mpi4py.MPI", partial(_on_mpi4py, world_size=world_size))


def _await_abort(companion: socket.socket) -> None:
    """With MPICH, end this process once it has called ``MPI_Abort``, which waits for a manager to kill it."""
    code = companion.recv(_MOST)  # without MPI_Abort, this waits until the process ends
    if code:
        os._exit(exit_code(int(code)))


def exit_code(code: int) -> int:
    """Return the exit code after ``MPI_Abort(code)``: never 0, which means success.

    >>> exit_code(7), exit_code(-1), exit_code(256), exit_code(0)
    (7, 255, 1, 1)
    """
    return code & 0xFF or 1


@contextmanager
def _temporary_files(folder: str) -> Iterator[None]:
    """Let Open MPI use a folder: it makes one in TMPDIR if the process manager has been killed."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _on_mpi4py(module: ModuleType, world_size: int) -> None:
    """Check that mpi4py has found all ranks, and unlink MPI's shared memory, which a killed rank would leave behind."""
    mpi: Any = module
    if not mpi.Is_initialized():
        return
    _check(mpi, world_size)
    mpi.COMM_WORLD.Barrier()  # after this, all ranks have opened the shared memory
    for name in segments.mapped([os.getpid()]):
        shared_memory.unlink(name)


def _check(mpi: Any, world_size: int) -> None:
    """RuntimeError if mpi4py has not found all ranks, as happens if it uses another MPI than the run."""
    if (size := mpi.COMM_WORLD.Get_size()) != world_size:
        library = mpi.Get_library_version().split("\n")[0].strip("\0")
        raise RuntimeError(
            f"mpi4py found {size} of {world_size} ranks: it uses {library}, but the run has started another MPI. "
            "Name the one that mpi4py uses: launch=Mpi('mpich') or Mpi('openmpi')"
        )


def leave(line: str, local_rank: int) -> None:
    """Finalize MPI, and wait until spawned processes have ended, as MPI's own launchers do."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # mpi4py does so at the interpreter's exit, which ranks skip
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as companion, suppress(OSError):  # it has ended
        companion.connect(f"\0{line}")
        companion.send(b"wait")
        companion.recv(1)
