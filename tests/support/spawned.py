"""What ranks start with ``MPI_Comm_spawn``, as a program. Its first argument says what it does."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI


def add(parent: Any) -> None:
    """Adds numbers up with the ranks."""
    merged = parent.Merge(high=True)
    merged.allreduce(1)
    merged.gather([os.environ.get("MARK"), os.environ.get("RANK"), os.uname().nodename, os.getcwd()])
    print(f"spawned {MPI.COMM_WORLD.rank} has added", flush=True)
    merged.Free()
    parent.Disconnect()


def spawn(parent: Any) -> None:
    """Starts a process itself, before it adds numbers up. With Open MPI 5.0.11, this hangs on several hosts."""
    leaf = MPI.COMM_SELF.Spawn(sys.executable, [__file__, "send"])
    leaf.recv()
    leaf.Disconnect()
    add(parent)


def send(parent: Any) -> None:
    parent.send(1, 0)
    parent.Disconnect()


def fail(parent: Any, how: str) -> None:
    ends = {
        "exits": lambda: os._exit(3),
        "aborts": lambda: MPI.COMM_WORLD.Abort(7),
        "dies": lambda: os.kill(os.getpid(), 9),
    }
    if MPI.COMM_WORLD.rank == 1:
        ends[how]()
    parent.recv()


def outlive(parent: Any, folder: str) -> None:
    """Goes on when the ranks have returned."""
    parent.Disconnect()
    Path(folder, "disconnected").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    print("spawned says goodbye", flush=True)


def stay(parent: Any, folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(folder, f"spawned-{MPI.COMM_WORLD.rank}").touch()
    parent.recv()


if __name__ == "__main__":
    globals()[sys.argv[1]](MPI.Comm.Get_parent(), *sys.argv[2:])
