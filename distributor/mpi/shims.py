"""The shims (processes that MPICH and Open MPI start in place of ranks), and the search for MPI's programs."""

from __future__ import annotations

import os
import pkgutil
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

#: The command of a shim (the process that MPI starts in place of a rank), which is the same for all nodes. Paths differ
#: between nodes, so each node sets the two variables.
SHIM = ("/bin/sh", "-c", 'exec "$DISTRIBUTOR_MPI_PYTHON" -S -E "$DISTRIBUTOR_MPI_SHIM"')


def environment(environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Write to ``folder`` the script of the shims (which MPI starts in place of ranks). Return the shims' environment.

    Args:
        environ: this process's environment.
        folder: the node's private folder.
    """
    return {
        **environ,
        "DISTRIBUTOR_MPI_PYTHON": sys.executable,
        "DISTRIBUTOR_MPI_SHIM": str(write("shim.py", folder)),
        "TMPDIR": folder,  # the files that MPI leaves in TMPDIR are removed with the folder
    }


def write(name: str, folder: str) -> Path:
    """Copy a script of this package into a folder, and return the copy's path.

    The package may be in a zip file, from which MPI could not start the script.
    """
    path = Path(folder, name)
    path.write_bytes(pkgutil.get_data("distributor.mpi", name) or b"")
    return path


def find(program: str) -> str | None:
    """Return the path of a program beside this Python or on ``PATH``; ``None`` if there is no such program."""
    beside = Path(sys.executable).parent / program
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(program)
