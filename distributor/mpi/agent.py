"""The script that Open MPI's ``prterun`` starts instead of ssh. It passes a host's command to node 0's companion.

Runs alone, without this package: ``python -S -E agent.py HOST COMMAND...``.
"""

import json
import os
import socket
import sys


def main() -> None:
    """Send the host and the command to the companion, and wait until the companion ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect("\0" + os.environ["DISTRIBUTOR_MPI_LINES"].split()[0] + "-agent")
        line.send(json.dumps(sys.argv[1:]).encode())
        line.recv(1)


if __name__ == "__main__":
    main()
