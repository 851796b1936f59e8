"""Open MPI's process manager: ``prterun`` on node 0, and a daemon, ``prted``, on each other host.

In place of ssh, ``prterun`` starts the script in ``remote_shell.py`` for each other host, which hands the daemon's
command to node 0's companion. Executors of one host share a daemon: two daemons with the same host name do not find
each other's ranks.

Source: https://docs.open-mpi.org/en/main/launching-apps/ssh.html; ``plm_ssh_agent`` in ``prte_info --all``
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from distributor.launch.mpi.environ import prefixes
from distributor.launch.mpi.programs import SHIM, find, write
from distributor.launch.mpi.shim import CHOSEN, RANK

_MOST = 1 << 16  # bytes of a command

NOTHING = ""  # in place of a command: node 0, and nodes that share a host with an earlier one, start no daemon


def is_here() -> bool:
    """Return whether this node has Open MPI 5."""
    return find("prterun") is not None


def begin(
    sizes: Sequence[int],
    hosts: Sequence[str],
    folder: str,
    environ: Mapping[str, str],
    show: Callable[[subprocess.Popen[str]], object],
) -> tuple[subprocess.Popen[str], list[str]]:
    """Start ``prterun`` on node 0, and return it with each node's command; ``show`` passes its output on."""
    here = socket.gethostname()  # the name by which prterun recognizes its own machine
    hosts = [here if host == hosts[0] else host for host in hosts]
    others = len({*hosts}) - 1
    slots = Path(folder, "hostfile")
    slots.write_text("".join(f"{host}\n" for host, size in zip(hosts, sizes) for _ in range(size)))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{environ['DISTRIBUTOR_MPI_LINES'].split()[0]}-agent")
        listener.listen(others + 1)
        process = _prterun(slots, _agent(folder), sum(sizes), environ)
        show(process)
        daemons = dict(_hear(listener, process) for _ in range(others))
    commands = [NOTHING if hosts.index(host) != node else daemons.get(host, NOTHING) for node, host in enumerate(hosts)]
    return process, commands


def _agent(folder: str) -> Path:
    agent = Path(folder, "agent.sh")
    script = write("remote_shell.py", folder)
    agent.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E {shlex.quote(str(script))} "$@"\n')
    agent.chmod(0o700)
    return agent


def _prterun(slots: Path, agent: Path, ranks: int, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start ``prterun`` as Open MPI's ``mpirun`` would; the ``mpirun`` on ``PATH`` may be MPICH's."""
    manager = {
        "plm_ssh_agent": str(agent),
        "plm_ssh_no_tree_spawn": "1",
        # By default, Open MPI does not go through a shim to start a process that ranks spawn.
        "odls_base_exec_agent": " ".join([*SHIM, CHOSEN]),
    }
    command = [
        *("mpirun", "--allow-run-as-root", "--leave-session-attached", "--bind-to", "none"),
        *(word for name, value in manager.items() for word in ("--prtemca", name, value)),
        *("--hostfile", str(slots), "--map-by", "seq:OVERSUBSCRIBE", "-n", str(ranks), *SHIM, RANK),
    ]
    ours = {"PRTE_MCA_schizo_proxy": "ompi", "OMPI_TOOL_NAME": "mpirun", **prefixes(), **environ}
    return subprocess.Popen(
        command,
        executable=find("prterun"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ours,
        text=True,
    )


def _hear(listener: socket.socket, prterun: subprocess.Popen[str]) -> tuple[str, str]:
    """Receive the name of a host, and the arguments of its daemon, from the script that runs in place of ssh."""
    listener.settimeout(1.0)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if (code := prterun.poll()) is not None:
                sys.exit(f"prterun ended with code {code} before it gave the commands that start MPI on the nodes")
            continue
        connection.setblocking(True)
        host, _, *arguments = json.loads(connection.recv(_MOST))  # the second word is the program: not needed
        connection.detach()  # stays open, so that the script ends when this process does
        return host, json.dumps([argument.strip('"') for argument in arguments])


def start(command: str, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start ``prted`` with the arguments that ``prterun`` has chosen. Its path may differ from that on node 0."""
    words = [find("prted") or "prted", *json.loads(command)]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, env={**prefixes(), **environ}, text=True)
