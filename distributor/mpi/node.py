"""The companion that runs MPICH's process manager on a node (see ``mpiexec.hydra``) and gives ranks their places.

On node 0, ``mpiexec -launcher manual`` says for each node which ``hydra_pmi_proxy`` to start there. The companions of
the other nodes fetch their command from that of node 0. Each proxy starts shims, which give their places in MPI's
world to this process, and it gives them to the ranks.

Source: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
"""

from __future__ import annotations

import os
import pkgutil
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from distributor.mpi import commands
from distributor.mpi.places import Places

#: What a proxy runs for each of its processes; the variables are its companion's.
_SHIM = 'exec "$DISTRIBUTOR_MPI_PYTHON" -S -E "$DISTRIBUTOR_MPI_SHIM"'


def serve(node: int, sizes: Sequence[int], head: tuple[str, int], folder: str, ready: Callable[[], None]) -> None:
    """Run MPICH on this node until SIGTERM. Never returns.

    Args:
        node: number of this node.
        sizes: number of ranks of each node.
        head: address of node 0 and a port of it, at which its companion tells the others what to start.
        folder: the node's private folder.
        ready: called once all ranks of this node have a place.
    """
    key = bytes.fromhex(os.environ.pop("DISTRIBUTOR_MPI_KEY"))
    places = Places(os.environ["DISTRIBUTOR_MPI_LINE"], sizes[node], lambda text: _fail(text, places))
    managers: dict[str, subprocess.Popen[str]] = {}
    if node == 0:
        managers["mpiexec"] = _mpiexec(sizes, head[0])
        lines = proxies(managers["mpiexec"], len(sizes))
        if len(sizes) > 1:
            listener = socket.create_server(head, family=socket.AF_INET6 if ":" in head[0] else socket.AF_INET)
            threading.Thread(target=commands.tell, args=(listener, key, lines), daemon=True).start()
        line = lines[0]
    else:
        line = commands.ask(head, key, node)
    managers["hydra_pmi_proxy"] = _proxy(line, folder)
    for name, manager in managers.items():
        threading.Thread(target=_await, args=(name, manager, places), daemon=True).start()
    places.give(ready)


def _mpiexec(sizes: Sequence[int], address: str) -> subprocess.Popen[str]:
    """Start ``mpiexec``. Names of hosts are only labels to it: with two executors on one host, names must differ."""
    hosts = ",".join(f"node{number}:{size}" for number, size in enumerate(sizes))
    shape = ["-launcher", "manual", "-localhost", address, "-hosts", hosts, "-genvnone", "-wdir", "/"]
    command = [_find("mpiexec.hydra"), *shape, "-n", str(sum(sizes)), "/bin/sh", "-c", _SHIM]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def proxies(mpiexec: subprocess.Popen[str], nodes: int) -> list[str]:
    """Return the command of each node's proxy, which ``mpiexec`` writes.

    Args:
        mpiexec: the process.
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
    sys.exit(f"mpiexec ended with code {mpiexec.wait()} before it said what to start")


def _proxy(line: str, folder: str) -> subprocess.Popen[str]:
    """Start this node's proxy: its program is this node's own."""
    shim = Path(folder, "shim.py")
    shim.write_bytes(pkgutil.get_data("distributor.mpi", "shim.py") or b"")
    environ = {**os.environ, "DISTRIBUTOR_MPI_PYTHON": sys.executable, "DISTRIBUTOR_MPI_SHIM": str(shim)}
    command = [_find("hydra_pmi_proxy"), *shlex.split(line)[1:]]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ, text=True)


def _find(program: str) -> str:
    """Return the path of a program of MPICH, beside this Python or on ``PATH``."""
    beside = Path(sys.executable).parent / program
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(program)
    if found is None:
        sys.exit(
            f"MPICH is not installed: there is no {program} beside {sys.executable}, and none on PATH. Install it "
            "there (pip install mpich mpi4py); launch='mpi' does not use Open MPI"
        )
    return found


def _await(name: str, manager: subprocess.Popen[str], places: Places) -> None:
    """Wait for the end of one of MPICH's processes."""
    manager.communicate()
    code = manager.returncode
    _fail(f"{name} was killed by signal {-code}" if code < 0 else f"{name} ended with code {code}", places)


def _fail(text: str, places: Places) -> None:
    """End this process as MPICH has ended, unless all ranks of the node have ended before, or do so now."""
    if not places.over:
        print(text, file=sys.stderr, flush=True)
        os._exit(1)
