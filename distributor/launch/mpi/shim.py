"""The process that MPI starts in place of a rank, and of each process that ranks spawn.

For a rank, it passes the place to the node's companion, and ends with it. A spawned process is its child, runs in the
ranks' current directory, and writes to the output of the node's first rank.

Runs alone, without this package: ``python -S -E shim.py [FOLDER COMMAND...] [distributor-rank]``.
"""

import json
import os
import shlex
import socket
import sys
import time

RANK = "distributor-rank"  # the last argument of shims that stand for ranks

CHOSEN = "-"  # stands for the current directory that Open MPI has chosen for a process, if it is here

_PATIENCE = 60.0  # seconds that a companion may take to start

_LONGEST = 1000  # characters of a command in the text of an error

_PREFIXES = ("PMI_", "MPI_", "PMIX_", "OMPI_", "PRTE_")  # of the variables in a place


def main() -> None:
    """Stand for a rank until the companion ends, or for a spawned process until it ends."""
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
    """Connect to the rank's companion, which may start later: Open MPI's daemon serves all executors of a host."""
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
    """Run a command in ``folder``, which may be relative to the ranks', report its end, and return its exit code."""
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
