"""A name server that never answers, and prints the name that each query asks for: ``dead_name_server.py ADDRESS``."""

from __future__ import annotations

import socket
import sys


def asked(query: bytes) -> str:
    """The name in a query (RFC 1035, 4.1): labels after the header of 12 bytes, each with its length before it."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    return ".".join(labels)


if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((sys.argv[1], 53))
        print("ready", flush=True)
        while True:
            print(asked(server.recv(512)), flush=True)
