"""What both kinds of MPI start in place of ranks, and where their programs are."""

from __future__ import annotations

import os
import pkgutil
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

#: The command of a shim; the variables are those of the node on which it runs.
SHIM = ("/bin/sh", "-c", 'exec "$DISTRIBUTOR_MPI_PYTHON" -S -E "$DISTRIBUTOR_MPI_SHIM"')


def environment(environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the environment in which shims run on this node, once their script is there.

    Args:
        environ: this process's environment.
        folder: the node's private folder.
    """
    return {
        **environ,
        "DISTRIBUTOR_MPI_PYTHON": sys.executable,
        "DISTRIBUTOR_MPI_SHIM": str(write("shim.py", folder)),
        "TMPDIR": folder,  # what MPI leaves there goes with the folder
    }


def write(name: str, folder: str) -> Path:
    """Write a script of this package, which may be in a zip file, into a folder. Return its path."""
    path = Path(folder, name)
    path.write_bytes(pkgutil.get_data("distributor.mpi", name) or b"")
    return path


def find(program: str) -> str | None:
    """Return the path of a program beside this Python or on ``PATH``; ``None`` if it is not there."""
    beside = Path(sys.executable).parent / program
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(program)
