"""How node 0 learns of the commands of Open MPI's daemons."""

from __future__ import annotations

import secrets
import socket
import subprocess
from pathlib import Path

import pytest

from distributor.launch.mpi import openmpi


def mpiexec(says: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["/bin/sh", "-c", f"{says}; exit 3"], stdout=subprocess.PIPE, text=True)


def test_an_agent_passes_on_the_command_of_its_hosts_daemon(tmp_path: Path) -> None:
    """``prterun`` runs it with the host, the program with its variables, and quoted arguments."""
    line = f"test-{secrets.token_hex(8)}"
    agent = openmpi._agent(str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{line}-agent")
        listener.listen()
        command = [str(agent), "host-b", "A=1;/x/prted", "--prtemca", "ess", '"env"']
        started = subprocess.Popen(command, env={"DISTRIBUTOR_MPI_LINES": f"{line} other"}, text=True)
        try:
            assert openmpi._hear(listener, started) == ("host-b", '["--prtemca", "ess", "env"]')
        finally:
            started.kill()
            started.wait()


def test_a_prterun_that_ends_early_is_an_error() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0test-{secrets.token_hex(8)}")
        listener.listen()
        with pytest.raises(
            SystemExit, match="prterun ended with code 3 before it gave the commands that start MPI on the nodes"
        ):
            openmpi._hear(listener, mpiexec("true"))
