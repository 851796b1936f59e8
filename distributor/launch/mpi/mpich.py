"""MPICH's process manager: ``mpiexec`` on node 0 prints, for each node, the command of its daemon, the *proxy*.

Source: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from distributor.launch.mpi.programs import SHIM, find
from distributor.launch.mpi.shim import RANK
from distributor.values.environment import NODE_ID

#: Prefixes of the variables that ``mpiexec`` gets: users' settings of MPICH, and the node's mark.
_SETTINGS = ("HYDRA_", "MPIEXEC_", "MPIR_", "MPICH_", "LD_LIBRARY_PATH", NODE_ID)


def is_here() -> bool:
    """Return whether this node has MPICH."""
    return find("mpiexec.hydra") is not None


def begin(
    sizes: Sequence[int], address: str, environ: Mapping[str, str], show: Callable[[subprocess.Popen[str]], object]
) -> tuple[subprocess.Popen[str], list[str]]:
    """Start ``mpiexec`` on node 0, and return it with each node's command; ``show`` passes its further output on."""
    # Labels in place of host names: mpiexec needs different names, and two executors may share a host.
    hosts = ",".join(f"node{number}:{size}" for number, size in enumerate(sizes))
    shape = ["-launcher", "manual", "-localhost", address, "-hosts", hosts, "-n", str(sum(sizes))]
    process = subprocess.Popen(
        [find("mpiexec.hydra") or "mpiexec.hydra", *shape, *SHIM, RANK],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # All processes get this environment and directory, on all nodes. With -genvnone, none can be spawned.
        env={name: value for name, value in environ.items() if name.startswith(_SETTINGS) and name != "HYDRA_ENV"},
        cwd="/",
        text=True,
    )
    commands = proxies(process, len(sizes))
    show(process)
    return process, commands


def proxies(mpiexec: subprocess.Popen[str], nodes: int) -> list[str]:
    """Return the command of each node's proxy; exit if ``mpiexec`` ends before it has printed them."""
    assert mpiexec.stdout is not None
    commands: dict[int, str] = {}
    for line in mpiexec.stdout:
        match = re.match(r"HYDRA_LAUNCH: (.*--proxy-id (\d+).*)", line)
        if match is not None:
            commands[int(match[2])] = match[1]
        elif line.startswith("HYDRA_LAUNCH_END"):
            return [commands[number] for number in range(nodes)]
        else:
            sys.stderr.write(line)
    sys.exit(f"mpiexec ended with code {mpiexec.wait()} before it printed the commands that start MPI on the nodes")


def start(command: str, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start this node's proxy. ``command`` begins with its path on node 0, which may differ here."""
    words = [find("hydra_pmi_proxy") or "hydra_pmi_proxy", *shlex.split(command)[1:]]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environ, text=True)
