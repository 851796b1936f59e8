"""Copies of other nodes' states in this node's shared memory, beside the states of its own ranks."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from distributor.channel.peers import PeerServer
from distributor.machine import network, state_folders
from distributor.values import codec
from distributor.values.checkpoints import PEERS, PeerAddress, PeerKey, SharedMemory
from distributor.values.messages import Copy

_SLOT = re.compile(r"\d{1,9}-[01]")


class ReplicaStore:
    """The copies that one node keeps: a ``channel.peers.PeerStore``."""

    def __init__(self, run_id: str, memory: SharedMemory) -> None:
        self._run_id = run_id
        self._folder = Path(memory.folder)
        self._limit = memory.limit
        self._newest: dict[Path, IncomingReplica] = {}
        self._lock = threading.Lock()

    def reserve(self, copy: Copy) -> IncomingReplica:
        """Reserve memory for a copy, in place of one of the same name. OSError if it does not fit or is invalid."""
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
        incoming = IncomingReplica(self._folder / copy.slot, self._seal)
        with self._lock:
            before = self._newest.get(incoming.path)
            self._newest[incoming.path] = incoming
        incoming.reserve(copy.tensors, self._limit, anew=before is not None and before.is_open)
        return incoming

    def _seal(self, incoming: IncomingReplica, record: bytes, objects: bytes) -> None:
        with self._lock:
            if self._newest[incoming.path] is not incoming:
                raise OSError("a newer copy of the rank's state has begun to arrive")
            state_folders.write_beside(incoming.path, objects, record)

    def path_of(self, path: str) -> str:
        """Return ``path`` if it is a file of this run's states here. OSError if not, or for the server's token."""
        folder, name = os.path.split(path)
        if name != PEERS and any(found.path == folder for found in state_folders.find(self._run_id)):
            return path
        raise FileNotFoundError(f"{path} is not kept by this node")


class IncomingReplica:
    """A copy of a state that arrives at ``path``. ``seal`` makes it valid, unless a newer one has begun to arrive."""

    def __init__(self, path: Path, seal: Callable[[IncomingReplica, bytes, bytes], None]) -> None:
        self.path = path
        self.is_open = True  # its connection may still write
        self._seal = seal
        self._view = self._tensors = memoryview(b"")

    def reserve(self, size: int, limit: int, *, anew: bool) -> None:
        """Reserve memory. An older copy at the path becomes invalid; its memory is used again unless ``anew``.

        OSError if the files with tensors in the folder would exceed ``limit`` bytes.
        """
        path, length = self.path, max(size, 1)  # an empty file cannot be mapped
        try:
            path.with_suffix(".record").unlink(missing_ok=True)
            if anew or not path.exists() or path.stat().st_size != length:
                path.unlink(missing_ok=True)
                state_folders.create_file(path, length, limit)
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except OSError:
            self.is_open = False
            raise
        self._view = memoryview(self._map)
        self._tensors = self._view[:size]

    @property
    def tensors(self) -> memoryview:
        return self._tensors

    def seal(self, record: bytes, objects: bytes) -> None:
        """Write the rest of the copy beside the tensors, which makes it valid."""
        self._seal(self, record, objects)

    def close(self) -> None:
        """Release this process's view; the file stays."""
        self._tensors.release()
        self.is_open = False
        with suppress(BufferError):  # the traceback of a broken connection may refer to this memory
            self._view.release()
            self._map.close()


def serve(run_id: str, key: PeerKey, memory: SharedMemory, address: str) -> PeerServer:
    """Start a server for states, and write its address and token to a file for this node's ranks."""
    listener = network.listen(address)
    port = listener.getsockname()[1]
    own = PeerAddress(address, port, key.certificate, key.token.hex())
    descriptor = os.open(f"{memory.folder}/{PEERS}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(codec.pack(own))
    server = PeerServer(listener, key, ReplicaStore(run_id, memory))
    server.start()
    return server
