"""The companion: a process on each node, beside the ranks. It runs MPI on the node, and connects each rank to MPI.

The companion of node 0 starts MPI's process manager. For each node, the manager provides a command, which starts the
manager's daemon there. (With Open MPI, the nodes of a host share one daemon, and the host of node 0 has none.) The
companions of the other nodes fetch their commands from the companion of node 0.

Each process that MPI starts gets a *place* from MPI: environment variables and, with MPICH, a socket. The
place tells the process its rank, and connects the process to MPI's process manager. Here, however, the launcher (a
process of this package) starts the ranks. MPI is therefore told to start a small process, the *shim*, in place of each
rank. The shim passes its place to the companion (the process that runs MPI on the node), and the companion passes the
place to the rank.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from distributor.launch.mpi import commands, mpich, openmpi
from distributor.launch.mpi.connector import PATIENCE, Places, ending
from distributor.launch.mpi.environ import variables
from distributor.launch.mpi.programs import environment
from distributor.machine import network, processes
from distributor.values import layout

KINDS: Mapping[str, Any] = {"mpich": mpich, "openmpi": openmpi}


def serve(
    node: int,
    sizes: Sequence[int],
    hosts: Sequence[str],
    head: tuple[str, int],
    folder: str,
    kind: str | None,
    ready: Callable[[], None],
) -> None:
    """Run MPI on this node until SIGTERM; on node 0, also run MPI's process manager. Never returns.

    Args:
        node: number of this node.
        sizes: number of ranks of each node.
        hosts: name of each node's host.
        head: address and port of node 0's companion (the process that runs MPI there). The companions of the other
            nodes connect to it to fetch the commands that start MPI's daemons.
        folder: the node's private folder.
        kind: the MPI to use: ``"mpich"``, ``"openmpi"``, or ``None`` for the one that node 0 has.
        ready: called once MPI has started its process (the shim) for each rank of this node.
    """
    key = bytes.fromhex(os.environ.pop("DISTRIBUTOR_MPI_KEY"))
    line = os.environ["DISTRIBUTOR_MPI_LINES"].split()[sum(sizes[:node])]
    places = Places(line, sizes[node], folder, lambda text, patience: _beside(_fail, text, places, patience))
    mine = None if node == 0 else commands.ask(head, key, node)
    kind = choose(kind if mine is None else mine.partition(" ")[0])
    beside = sum(size for size, host in zip(sizes, hosts) if host == hosts[node])
    environ = environment(os.environ, folder, line, variables(os.environ, kind, crowded=beside > processes.cpu_count()))
    if mine is None:
        manager, told = _begin(kind, sizes, hosts, head[0], folder, environ, partial(_beside, _show, places, folder))
        _watch("mpiexec" if kind == "mpich" else "prterun", manager, places)
        lines = [f"{kind} {command}" for command in told]
        _tell(head, key, lines)
        mine = lines[0]
    if command := mine.partition(" ")[2]:
        _watch("hydra_pmi_proxy" if kind == "mpich" else "prted", KINDS[kind].start(command, environ), places)
    places.give(ready)


def choose(kind: str | None) -> str:
    """Return the MPI to use: ``kind`` if given, else MPICH, or Open MPI if MPICH is not installed.

    End this process with an error if the MPI that ``kind`` names is not installed or, without ``kind``, if neither
    MPICH nor Open MPI is installed.
    """
    for name in [kind] if kind is not None else KINDS:
        if KINDS[name].is_here():
            return name
    what = {"mpich": "MPICH is not", "openmpi": "Open MPI is not"}.get(kind or "", "neither MPICH nor Open MPI is")
    program = "prterun" if kind == "openmpi" else "mpiexec.hydra"
    sys.exit(
        f"{what} installed: there is no {program} beside {sys.executable} or on PATH. Install MPI where ranks run "
        f"(pip install {kind or 'mpich'} mpi4py)"
    )


def _begin(
    kind: str,
    sizes: Sequence[int],
    hosts: Sequence[str],
    address: str,
    folder: str,
    environ: Mapping[str, str],
    show: Callable[[subprocess.Popen[str]], object],
) -> tuple[subprocess.Popen[str], list[str]]:
    if kind == "mpich":
        return mpich.begin(sizes, address, environ, show)
    return openmpi.begin(sizes, hosts, folder, environ, show)


def _tell(head: tuple[str, int], key: bytes, lines: Sequence[str]) -> None:
    if len(lines) > 1:
        listener = socket.create_server(head, family=network.family_of(head[0]))
        _beside(commands.tell, listener, key, lines)


def _watch(name: str, manager: subprocess.Popen[str], places: Places) -> None:
    _beside(_await, name, manager, places)


def _beside(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in a separate thread."""
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _await(name: str, manager: subprocess.Popen[str], places: Places) -> None:
    """Wait until MPI's process manager or the manager's daemon ends. Report this as an error if ranks still run."""
    _fail(f"{name} {ending(manager.wait())}", places, PATIENCE)


def _show(places: Places, folder: str, manager: subprocess.Popen[str]) -> None:
    """Write to stderr what MPI's process manager says and, while ranks run, also to the stderr of the first rank.

    It says, for example, why it cannot spawn a process.
    """
    assert manager.stdout is not None
    with open(layout.rank_log(folder, 0, "stderr"), "a") as file:
        for line in manager.stdout:
            for stream in (sys.stderr, file) if places.full else (sys.stderr,):
                print(line, end="", file=stream, flush=True)


def _fail(text: str, places: Places, patience: float) -> None:
    """End this process with an error because a process has ended, unless all ranks of the node have ended by then."""
    time.sleep(patience)
    if not places.over:
        print(text, file=sys.stderr, flush=True)
        os._exit(1)
