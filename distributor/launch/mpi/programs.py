"""The command and the environment of shims, and the search for MPI's programs."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import site
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from distributor.values import layout
from distributor.values.environment import NODE_ID

#: The same for all nodes, so each node sets its paths and mark as variables: MPICH gives all processes node 0's mark.
#: The command has tabs because Open MPI splits it at blanks.
SHIM = (
    "/bin/sh",
    "-c",
    f'export\t{NODE_ID}="$DISTRIBUTOR_MPI_NODE";exec\t"$DISTRIBUTOR_MPI_PYTHON"\t-S\t-E\t"$DISTRIBUTOR_MPI_SHIM"\t"$@"',
    "sh",
)


def environment(environ: Mapping[str, str], folder: str, line: str, mpi: Mapping[str, str]) -> dict[str, str]:
    """Write the script of shims to ``folder``, and return their environment."""
    spawn = {
        "line": line,
        "folder": os.getcwd(),
        "logs": [str(layout.rank_log(folder, 0, stream)) for stream in ("stdout", "stderr")],
        # Open MPI would give spawned processes on all nodes the variables of ``prterun`` and of one rank.
        "environ": {**mpi, "TMPDIR": environ.get("TMPDIR"), "PYTHONPATH": os.pathsep.join(_import_path())},
    }
    return {
        **environ,
        "DISTRIBUTOR_MPI_NODE": environ[NODE_ID],
        "DISTRIBUTOR_MPI_PYTHON": sys.executable,
        "DISTRIBUTOR_MPI_SHIM": str(write("shim.py", folder)),
        "DISTRIBUTOR_MPI_SPAWN": json.dumps(spawn),
        "TMPDIR": folder,  # the files that MPI leaves in TMPDIR are removed with the folder
    }


def _import_path() -> list[str]:
    """Return the ranks' import path without the folders of this Python: a process may run another one."""
    library = sysconfig.get_path("stdlib")
    library_folders = {library, os.path.join(library, "lib-dynload"), *site.getsitepackages()}
    return [path for path in dict.fromkeys(sys.path) if path and path not in library_folders]


def write(name: str, folder: str) -> Path:
    """Copy a script to a folder: the package may be in a zip file, from which MPI cannot start it."""
    path = Path(folder, name)
    path.write_bytes(pkgutil.get_data("distributor.launch.mpi", name) or b"")
    return path


def find(program: str) -> str | None:
    """Return the path of a program beside this Python or on ``PATH``, if there is one."""
    beside = Path(sys.executable).parent / program
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(program)
