"""The private line between an agent and the process that started it: its task's Python worker, or the driver itself.

A socket pair inherited by the agent carries length-prefixed pickles of plain values. Nobody else can reach it; its end
is how each side learns that the other is gone. Standard library only, and self-contained: one end lives in Spark's
Python workers, where this package is not installed.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Run by ``python -c``: imports the package from a given place without shadowing anything, nor the current directory.
_BOOTSTRAP = """
import sys
root, module, *args = sys.argv[1:]
sys.path[:] = [path for path in sys.path if path]
import importlib.util
if root.endswith(".zip"):
    sys.path.insert(0, root)
else:
    at = root + "/distributor"
    spec = importlib.util.spec_from_file_location("distributor", at + "/__init__.py", submodule_search_locations=[at])
    sys.modules["distributor"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["distributor"])
importlib.import_module("distributor." + module).main(*args)
"""


def send(sock: socket.socket, message: Any) -> None:
    """Sends one message."""
    data = pickle.dumps(message, protocol=5)
    sock.sendall(struct.pack("!Q", len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> Any:
    """Receives one message, ``None`` when the other side is gone."""
    header = _read_exactly(sock, 8)
    if header is None:
        return None
    data = _read_exactly(sock, struct.unpack("!Q", header)[0])
    return None if data is None else pickle.loads(data)


def _read_exactly(sock: socket.socket, size: int) -> bytearray | None:
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        try:
            count = sock.recv_into(view[filled:])
        except ConnectionError:
            return None
        if count == 0:
            return None
        filled += count
    return buffer


def command(root: str, module: str, *args: str) -> list[str]:
    """The command line that runs ``distributor.<module>.main(*args)`` with the package found at ``root``."""
    return [sys.executable, "-c", _BOOTSTRAP, root, module, *args]


def pieces(path: str, chunk: int, offset: int = 0) -> Iterator[bytes]:
    """A file from an offset on, in pieces of so many bytes."""
    with open(path, "rb") as file:
        file.seek(offset)
        while piece := file.read(chunk):
            yield piece


def rest(files: Iterable[Mapping[str, Any]], chunk: int) -> Iterator[tuple[int, int, int, bytes]]:
    """What the channel did not bring of the ranks' output, as a report lists it: rank, stream, offset, piece."""
    for file in files:
        offset = file["offset"]
        for piece in pieces(file["path"], chunk, offset):
            yield file["rank"], file["stream"], offset, piece
            offset += len(piece)
