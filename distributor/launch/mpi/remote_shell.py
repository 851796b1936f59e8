"""The script that Open MPI's ``prterun`` starts instead of ssh, in order to start MPI's daemon on another host.

``prterun`` gives the script the name of a host and the command that starts MPI's daemon there. The script passes both
to the *companion* of node 0 (the process that runs ``prterun``). The companion passes the command to a node on that
host, and that node starts the daemon.

The script runs alone, without this package: ``python -S -E remote_shell.py HOST COMMAND...``.
"""

import json
import os
import socket
import sys


def main() -> None:
    """Send this script's arguments to the companion of node 0, and wait until the companion ends.

    The arguments are a host, and the command that starts MPI's daemon on that host. The companion of node 0 (the
    process that runs ``prterun``) passes the command on to a node on that host.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect("\0" + os.environ["DISTRIBUTOR_MPI_LINES"].split()[0] + "-agent")
        line.send(json.dumps(sys.argv[1:]).encode())
        line.recv(1)


if __name__ == "__main__":
    main()
