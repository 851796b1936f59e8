"""MPICH's process manager: ``mpiexec`` on node 0 prints the ``hydra_pmi_proxy`` command for each node.

Source: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from distributor.mpi.shims import SHIM, find


def is_here() -> bool:
    """Return whether this node has MPICH."""
    return find("mpiexec.hydra") is not None


def begin(sizes: Sequence[int], address: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Start ``mpiexec`` on node 0, and return the process and the command of each node.

    ``mpiexec`` gets labels in place of host names, because it needs different names even for two executors on one host.

    Args:
        sizes: number of ranks of each node.
        address: the address of node 0, where proxies connect.
    """
    hosts = ",".join(f"node{number}:{size}" for number, size in enumerate(sizes))
    shape = ["-launcher", "manual", "-localhost", address, "-hosts", hosts, "-genvnone", "-wdir", "/"]
    command = [find("mpiexec.hydra") or "mpiexec.hydra", *shape, "-n", str(sum(sizes)), *SHIM]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    return process, proxies(process, len(sizes))


def proxies(mpiexec: subprocess.Popen[str], nodes: int) -> list[str]:
    """Return the command of each node's proxy, as ``mpiexec`` prints it.

    Args:
        mpiexec: the process that prints the commands.
        nodes: number of nodes.
    """
    assert mpiexec.stdout is not None
    found: dict[int, str] = {}
    for line in mpiexec.stdout:
        told = re.match(r"HYDRA_LAUNCH: (.*--proxy-id (\d+).*)", line)
        if told is not None:
            found[int(told[2])] = told[1]
        if line.startswith("HYDRA_LAUNCH_END"):
            return [found[number] for number in range(nodes)]
    sys.exit(f"mpiexec ended with code {mpiexec.wait()} before it printed the commands that start MPI on the nodes")


def start(command: str, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start this node's proxy with the program that is installed on this node, whose path may differ from node 0's.

    Args:
        command: the command that ``mpiexec`` has printed.
        environ: the environment of the proxy. The processes that it starts in place of ranks inherit it.
    """
    words = [find("hydra_pmi_proxy") or "hydra_pmi_proxy", *shlex.split(command)[1:]]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environ, text=True)
