"""The process (*shim*) that MPI starts in place of a rank.

For the shim, MPI sets environment variables that the rank needs in order to join MPI. The shim sends these variables to
the companion (the process that runs MPI on the rank's node), and the companion passes them on to the rank. The shim
ends when the companion ends.

The script runs alone, without this package: ``python -S -E shim.py``.
"""

import json
import os
import socket
import sys
import time

#: Number of seconds that the companion (the process that runs MPI on the rank's node) may take to start.
_PATIENCE = 60.0

#: Prefixes of the variables that process managers set. Ranks find their place in MPI by these variables.
_PREFIXES = ("PMI_", "MPI_", "PMIX_", "OMPI_", "PRTE_")


def main() -> None:
    """Send MPI's environment variables to the companion, the process that runs MPI on the rank's node.

    With MPICH, also send the companion the socket that is connected to MPICH's process manager. Then wait until the
    companion, the process that runs MPI on the rank's node, has ended.
    """
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


if __name__ == "__main__":
    main()
