"""How a model that an executor keeps is found and ended: by the folder of its server, with a socket and a list of GPUs.

Standard library only: it travels into Spark's workers by value.
"""

from __future__ import annotations

import fcntl
import glob
import os
import socket
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from distributor.machine import folders, processes
from distributor.values.layout import PREFIX

#: What is in the folder. A server that starts keeps the lock until it listens; without the list, it uses no GPU.
LOCK, SOCKET, GPUS = "lock", "socket", "gpus"

#: What a connection may want: the end of a model that no task uses, or its end as soon as no task does. The connection
#: ends with the server, after all its processes; with another answer to the first than this one, at once.
RELEASE, VACATE = b"r", b"v"
RELEASED = b"r"


def folder_prefix(owner: int | None) -> str:
    """Return how the folders of an executor's models begin; without an owner, of all executors'."""
    return os.path.join(tempfile.gettempdir(), f"{PREFIX}model-" + ("" if owner is None else f"{owner}-"))


def on_gpus(gpus: Collection[str], owner: int | None) -> list[str]:
    """Return the folders of an executor's models, or of all without an owner, that are on any of these GPUs."""
    found = []
    for path in glob.glob(f"{glob.escape(folder_prefix(owner))}*/{GPUS}"):
        folder = os.path.dirname(path)
        with suppress(OSError):  # it is removed meanwhile
            if folders.is_private(folder) and not set(gpus).isdisjoint(Path(path).read_text().split("\n")):
                found.append(folder)
    return found


def connect(folder: str, wish: bytes) -> socket.socket:
    """Connect to a server, and say what for. FileNotFoundError, ConnectionRefusedError: there is none."""
    descriptor = os.open(folder, os.O_DIRECTORY)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"/proc/self/fd/{descriptor}/{SOCKET}")  # a socket's path has at most 107 bytes
        connection.sendall(wish)
        return connection
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(descriptor)


def release(folder: str) -> bool:
    """End a model unless a task uses it; return whether it has ended."""
    with suppress(OSError), connect(folder, RELEASE) as control:
        return control.recv(1) == RELEASED and not control.recv(1)
    return False


def vacate(models: Sequence[str], patience: float) -> int:
    """Wait until models have ended, which those do that no task uses; return how many go on.

    These end as soon as their tasks have.
    """
    deadline = time.monotonic() + patience
    going: list[socket.socket] = []
    for folder in models:
        with suppress(OSError), open(os.path.join(folder, LOCK)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            going.append(connect(folder, VACATE))
    left = {each.fileno() for each in going}
    while left and (remaining := deadline - time.monotonic()) > 0:
        left -= set(processes.readable(left, remaining))
    for each in going:
        each.close()
    return len(left)
