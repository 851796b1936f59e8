"""The connection between nodes: ranks send copies of their states to other nodes, and fetch states from them.

A *state* is what a rank saves as a checkpoint. The client is a rank, the server the agent of another node, with a
thread for each connection, because one may carry gigabytes. Standard library only. A connection carries one request:

    client: token | Copy, or Recall
    server: Proceed or Refused
    then    the copy's bytes from the client, and Received or Refused from the server; or the recalled bytes
"""

from __future__ import annotations

import hmac
import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ParamSpec, Protocol, TypeVar

from distributor.channel import tls
from distributor.channel.connections import CONNECT_TIMEOUT, PIECE, Endpoint, connect, exactly, fill, pack, read
from distributor.values.checkpoints import PeerKey
from distributor.values.messages import Copy, Message, Proceed, Recall, Received, Refused

_SILENCE = 30.0  # seconds without progress after which the other side is lost

#: Maximum number of bytes of a request, and of connections at a time; further ones wait.
_MOST_BYTES = 4 << 20
_MOST_LINES = 64

_ACCEPT_AGAIN = 0.1  # seconds after a failure to accept or serve, for example with too many open files


P = ParamSpec("P")
T = TypeVar("T")

Part = tuple[int, int]  # offset in a file, number of bytes


class Incoming(Protocol):
    """The memory for one copy of a rank's state."""

    @property
    def tensors(self) -> memoryview:
        """Where the copy's tensors go."""

    def seal(self, record: bytes, objects: bytes) -> None:
        """Store the rest of the copy, and mark it as complete."""

    def close(self) -> None:
        """Release the memory; an incomplete copy is never used."""


class PeerStore(Protocol):
    """Keeps copies of states of other nodes' ranks. Several threads may call it."""

    def reserve(self, copy: Copy) -> Incoming:
        """Make room for a copy; OSError if there is none."""

    def path_of(self, path: str) -> str:
        """Return ``path`` if other nodes' ranks may read it; OSError if not."""


class PeerServer(threading.Thread):
    """Receives copies of other nodes' states and sends parts of states, until :meth:`close`."""

    def __init__(self, listener: socket.socket, key: PeerKey, store: PeerStore) -> None:
        super().__init__(name="distributor-peers", daemon=True)
        self._listener = listener
        self._context = tls.server_context(key.certificate, key.private)
        self._token = key.token
        self._store = store
        self._places = threading.BoundedSemaphore(_MOST_LINES)
        self._closed = threading.Event()

    def run(self) -> None:
        while True:
            self._places.acquire()
            try:
                line, _ = self._listener.accept()
            except OSError:  # the server was closed, this process has too many open files, or the client has left
                self._places.release()
                if self._closed.wait(_ACCEPT_AGAIN):
                    return
                continue
            try:
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()
            except RuntimeError:  # this process can start no further thread now
                line.close()
                self._places.release()
                self._closed.wait(_ACCEPT_AGAIN)

    def close(self) -> None:
        """Accept no more connections; requests that are being served go on."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
        self._listener.close()

    def _serve(self, line: socket.socket) -> None:
        try:
            line.settimeout(CONNECT_TIMEOUT)  # for the handshake and the request
            with self._context.wrap_socket(line, server_side=True) as secured:
                if hmac.compare_digest(exactly(secured, tls.TOKEN_BYTES), self._token):
                    message = read(secured, _MOST_BYTES)
                    secured.settimeout(_SILENCE)
                    self._answer(message, secured)
        except (OSError, ValueError):  # not a client of this run, or a rank that has ended meanwhile
            pass
        finally:
            line.close()
            self._places.release()

    def _answer(self, message: Message, line: socket.socket) -> None:
        try:
            if isinstance(message, Copy):
                self._take(message, line)
            elif isinstance(message, Recall):
                self._give(message, line)
        except _StoreError as error:
            line.sendall(pack(Refused(str(error))))

    def _take(self, copy: Copy, line: socket.socket) -> None:
        incoming = _ask_store(self._store.reserve, copy)
        try:
            line.sendall(pack(Proceed()))
            record, objects = exactly(line, copy.record), exactly(line, copy.objects)
            fill(line, incoming.tensors)
            _ask_store(incoming.seal, record, objects)
            line.sendall(pack(Received()))
        finally:
            incoming.close()

    def _give(self, recall: Recall, line: socket.socket) -> None:
        with _ask_store(_Mapped, _ask_store(self._store.path_of, recall.path)) as file:
            _ask_store(file.check, recall.parts)
            line.sendall(pack(Proceed()))
            file.send(recall.parts, line)


class _StoreError(Exception):
    """This node has no room for a copy, or lacks the state."""


def _ask_store(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of this node's store; its OSError becomes a _StoreError.

    So a lack of memory here, which the client is told, is not taken for a failure of the connection, an OSError.
    """
    try:
        return call(*args, **kwargs)
    except OSError as error:
        raise _StoreError(str(error)) from None


class _Mapped:
    """A mapped file of a rank's state, tensors or the rest; OSError if it is empty or cannot be read."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        except ValueError:
            raise OSError(f"{path} is empty") from None
        finally:
            os.close(descriptor)

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def check(self, parts: Sequence[Part]) -> None:
        if not all(offset >= 0 and size >= 0 and offset + size <= len(self._map) for offset, size in parts):
            raise OSError("the requested bytes of a rank's state are not all within the file that contains the state")

    def send(self, parts: Sequence[Part], line: socket.socket) -> None:
        with memoryview(self._map) as whole:
            for offset, size in parts:
                for start in range(offset, offset + size, PIECE):
                    with whole[start : min(start + PIECE, offset + size)] as piece:
                        line.sendall(piece)


def send_copy(peer: Endpoint, slot: str, record: bytes, objects: bytes, path: str, parts: Sequence[Part]) -> None:
    """Send a state to the agent of another node, and wait until it has it.

    ``slot`` names the file of tensors there, ``record`` describes the state, ``objects`` is what is not tensors, and
    ``parts`` of the file ``path`` are the tensors. OSError if the agent cannot be reached or has no room, ValueError if
    its answer is no message.
    """
    with connect(peer) as line, _Mapped(path) as file:
        line.settimeout(_SILENCE)
        line.sendall(pack(Copy(slot, len(record), len(objects), sum(size for _, size in parts))))
        _expect(Proceed, line)
        line.sendall(record)
        line.sendall(objects)
        file.send(parts, line)
        _expect(Received, line)


def recall(peer: Endpoint, path: str, parts: Sequence[Part]) -> bytearray:
    """Return the joined parts of a file on another node; OSError if its agent cannot be reached or has no such file."""
    data = bytearray(sum(size for _, size in parts))
    with connect(peer) as line:
        line.settimeout(_SILENCE)
        line.sendall(pack(Recall(path, tuple(parts))))
        _expect(Proceed, line)
        fill(line, memoryview(data))
    return data


def _expect(kind: type[Message], line: socket.socket) -> None:
    """Read the server's answer; OSError if it refuses."""
    answer = read(line)
    if isinstance(answer, Refused):
        raise OSError(answer.why)
    if not isinstance(answer, kind):
        raise ConnectionError(f"unexpected answer from the other node: {answer}")
