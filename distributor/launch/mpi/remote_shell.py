"""What ``prterun`` starts in place of ssh: passes a host, and its daemon's command, to node 0's companion.

Runs alone, without this package: ``python -S -E remote_shell.py HOST COMMAND...``.
"""

import json
import os
import socket
import sys


def main() -> None:
    """Send this script's arguments to node 0's companion, and wait until it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect("\0" + os.environ["DISTRIBUTOR_MPI_LINES"].split()[0] + "-agent")
        line.send(json.dumps(sys.argv[1:]).encode())
        line.recv(1)


if __name__ == "__main__":
    main()
