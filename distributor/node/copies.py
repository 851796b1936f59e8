"""Keep copies of what ranks of other nodes pass to ``save_checkpoint``, and send these copies to ranks on request.

What a rank passes to ``save_checkpoint`` is called its *state*. The node's shared memory holds the states of the node's
own ranks, and copies of states of other nodes' ranks.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from contextlib import suppress
from pathlib import Path

from distributor.channel.peers import PeerServer
from distributor.machine import network, state_folders
from distributor.values.checkpoints import PEERS, PeerKey, SharedMemory
from distributor.values.messages import Copy

_SLOT = re.compile(r"\d{1,9}-[01]")


class Copies:
    """The copies that one node keeps of the states of other nodes' ranks.

    A *state* is what a rank passes to ``save_checkpoint``. This class implements the protocol ``channel.peers.Store``.

    Args:
        run_id: ID of the run.
        memory: the node's folder in shared memory, and the maximum size of its content.
    """

    def __init__(self, run_id: str, memory: SharedMemory) -> None:
        self._run_id = run_id
        self._folder = Path(memory.folder)
        self._limit = memory.limit

    def reserve(self, copy: Copy) -> Incoming:
        """Reserve memory for a copy of a rank's state. The new copy replaces any copy that has the same name.

        A *state* is what a rank passes to ``save_checkpoint``.

        Raises:
            OSError: the copy does not fit into the shared memory that this node may use, or the copy's name or one of
                its sizes is invalid.
        """
        if not _SLOT.fullmatch(copy.slot) or min(copy.record, copy.objects, copy.tensors) < 0:
            raise OSError(
                f"the copy {copy.slot!r} of a rank's state is refused: its name does not look like '3-0', or one of "
                "its sizes is negative"
            )
        if copy.record + copy.objects > self._limit:
            raise OSError(
                f"a rank's state without its tensors has {copy.record + copy.objects} bytes, which is already more "
                "than this node may keep in shared memory"
            )
        return Incoming(self._folder / copy.slot, copy.tensors, self._limit)

    def path_of(self, path: str) -> str:
        """Return ``path``, which a rank has requested, if it is in a folder with states of this run's ranks.

        Raises:
            OSError: the path is not in a folder with states of this run's ranks, or it leads to a file that contains
                the token of this node's server instead of a state.
        """
        folder, name = os.path.split(path)
        if name != PEERS and any(found.path == folder for found in state_folders.find(self._run_id)):
            return path
        raise FileNotFoundError(f"{path} is not kept by this node")


class Incoming:
    """Memory for one copy of a rank's state (what the rank passes to ``save_checkpoint``).

    Args:
        path: the file for the copy's tensors. An older copy in this file becomes invalid.
        size: number of bytes of the tensors.
        limit: maximum total size, in bytes, of the files with ranks' tensors in the folder of ``path``.

    Raises:
        OSError: the copy does not fit into the shared memory that this node may use.
    """

    def __init__(self, path: Path, size: int, limit: int) -> None:
        self._path = path
        path.with_suffix(".record").unlink(missing_ok=True)
        length = max(size, 1)  # an empty file cannot be mapped
        if not path.exists() or path.stat().st_size != length:
            path.unlink(missing_ok=True)
            state_folders.create_file(path, length, limit)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._view = memoryview(self._map)
        self._tensors = self._view[:size]

    @property
    def tensors(self) -> memoryview:
        """The memory for the tensors of the copied state."""
        return self._tensors

    def seal(self, record: bytes, objects: bytes) -> None:
        """Write the copy's ``objects`` and its ``record`` (which describes the state) to files beside the tensors.

        The copy of the state is then complete and valid.
        """
        state_folders.write_beside(self._path, objects, record)

    def close(self) -> None:
        """Release this process's view of the copied state's memory. The file with the tensors stays."""
        self._tensors.release()
        with suppress(BufferError):  # the traceback of a broken connection may refer to this memory
            self._view.release()
            self._map.close()


def serve(run_id: str, key: PeerKey, memory: SharedMemory, address: str) -> PeerServer:
    """Start a server that keeps copies of states of other nodes' ranks, and sends states to ranks that ask for them.

    A *state* is what a rank passes to ``save_checkpoint``.

    Write the server's address, certificate and token to a file for this node's ranks. The ranks of all nodes then
    exchange the addresses of their nodes' servers.

    Args:
        run_id: ID of the run.
        key: the certificate, its private key and the token that all nodes of the run use.
        memory: the node's folder in shared memory.
        address: the address of this node, at which the server listens.
    """
    listener = network.listen(address)
    port = listener.getsockname()[1]
    told = {"address": address, "port": port, "certificate": key.certificate, "token": key.token.hex()}
    descriptor = os.open(f"{memory.folder}/{PEERS}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(told, file)
    server = PeerServer(listener, key, Copies(run_id, memory))
    server.start()
    return server
