"""The process that MPICH starts in place of a rank: it gives its place to the rank, and stays until it is ended.

Runs alone, without this package: ``python -S -E shim.py``.
"""

import json
import os
import socket


def main() -> None:
    """Send the variables and the descriptor of the process manager to the companion, and wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect("\0" + os.environ["DISTRIBUTOR_MPI_LINE"])
        place = {name: value for name, value in os.environ.items() if name.startswith(("PMI_", "MPI_"))}
        socket.send_fds(line, [json.dumps(place).encode()], [int(place["PMI_FD"])])
        line.recv(1)


if __name__ == "__main__":
    main()
