"""The process (*shim*) that MPI starts in place of a rank, and in place of each process that ranks spawn.

In place of a rank: MPI sets environment variables that the rank needs in order to join MPI. The shim sends these
variables to the companion (the process that runs MPI on the rank's node), and the companion passes them on to the rank.
The shim ends when the companion ends.

In place of a process that ranks spawn (``MPI_Comm_spawn``): the shim starts this process as its child, in the ranks'
current directory, and with the output of the node's first rank. It tells the companion how the child has ended.

The script runs alone, without this package: ``python -S -E shim.py [FOLDER COMMAND...] [distributor-rank]``.
"""

import json
import os
import shlex
import socket
import sys
import time

#: The last argument of shims that stand for ranks.
RANK = "distributor-rank"

#: Stands for the current directory that Open MPI has chosen for a process.
CHOSEN = "-"

#: Number of seconds that the companion (the process that runs MPI on the rank's node) may take to start.
_PATIENCE = 60.0

#: Maximum number of characters of a command in the text of an error.
_LONGEST = 1000

#: Prefixes of the variables that process managers set. Ranks find their place in MPI by these variables.
_PREFIXES = ("PMI_", "MPI_", "PMIX_", "OMPI_", "PRTE_")


def main() -> None:
    """Stand for a rank until the companion ends, or for a process that ranks spawn until the process ends."""
    if sys.argv[-1] != RANK:
        sys.exit(spawn(sys.argv[1], sys.argv[2:]))
    place = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    rank = int(place.get("PMI_RANK") or place["OMPI_COMM_WORLD_RANK"])
    descriptors = [int(place["PMI_FD"])] if "PMI_FD" in place else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        connect(line, rank)
        socket.send_fds(line, [json.dumps(place).encode()], descriptors)
        line.recv(1)


def connect(line: socket.socket, rank: int) -> None:
    """Connect to the companion, the process that runs MPI on the rank's node.

    Try again for :data:`_PATIENCE` seconds, because the companion may start later than this process. With Open MPI, one
    daemon starts the processes that call this function (the shims) for all executors of a host, but each executor
    starts its own companion.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            line.connect("\0" + os.environ["DISTRIBUTOR_MPI_LINES"].split()[rank])
            return
        except OSError:
            if time.monotonic() > end:
                sys.exit(
                    f"rank {rank} is not on this machine: two machines may have the same host name, so give each "
                    "machine its own host name"
                )
            time.sleep(0.05)


def spawn(folder: str, command: list[str]) -> int:
    """Run a command for ranks, and return its exit code. Tell the companion how it has ended.

    With MPICH, the command's process speaks to MPICH's manager through the companion, as ranks do.

    Args:
        folder: the current directory of the process. A relative path starts at the current directory of the ranks. With
            :data:`CHOSEN`, it is the one that Open MPI has chosen, if this machine has it.
        command: the program to run, with its arguments.
    """
    settings = json.loads(os.environ["DISTRIBUTOR_MPI_SPAWN"])
    for descriptor, path in enumerate(settings["logs"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DISTRIBUTOR_MPI_")}
    environ = {name: value for name, value in {**environ, **settings["environ"]}.items() if value is not None}
    if folder == CHOSEN:
        folder = environ.get("OMPI_MCA_initial_wdir", os.getcwd())
        folder = folder if os.path.isdir(folder) else "."
    manager = int(environ.get("PMI_FD", -1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect("\0" + settings["line"])
        text = shlex.join(command).replace("\n", " ")[:_LONGEST]
        socket.send_fds(line, [json.dumps([os.getpid(), text]).encode()], [manager] if manager >= 0 else [])
        _, descriptors, _, _ = socket.recv_fds(line, 1, 1)
        for descriptor in descriptors:
            os.dup2(descriptor, manager)
            os.close(descriptor)
        code = _run(os.path.normpath(os.path.join(settings["folder"], folder)), command, environ, manager)
        line.send(str(code).encode())
        return code & 0xFF


def _run(folder: str, command: list[str], environ: dict[str, str], manager: int) -> int:
    """Run a command, and return its exit code; negative if a signal has ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(folder)
            os.execvpe(command[0], command, {**environ, "PWD": os.getcwd()})
        except OSError as error:
            print(f"MPI_Comm_spawn cannot start {command[0]} in {folder}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    if manager >= 0:
        os.close(manager)  # MPICH's manager sees the end of a process by its end of this connection
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
