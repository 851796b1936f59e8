"""The connection between nodes: ranks send copies of their states to other nodes, and fetch states from them.

A *state* is what a rank saves as a checkpoint, such as a model and an optimizer. Each node's agent serves connections
from ranks of other nodes. Each connection has a thread of its own, because a connection may carry gigabytes. This
module uses the standard library only.

A connection carries one request. The client (a rank) shows the token that all nodes of the run share. Then it sends a
:class:`~distributor.values.messages.Copy` to announce its state, or a :class:`~distributor.values.messages.Recall` to
ask for a state. The server (the agent of another node) answers ``Proceed`` or ``Refused``. After ``Proceed``, the
client sends the bytes of a ``Copy``, or the server sends the bytes for a ``Recall``. Once the server has a whole copy,
it answers ``Received``, or ``Refused`` if it cannot store the copy.
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
from distributor.channel.lines import CONNECT_TIMEOUT, PIECE, Endpoint, connect, exactly, fill, pack, read
from distributor.values.checkpoints import PeerKey
from distributor.values.messages import Copy, Message, Proceed, Recall, Received, Refused

#: Number of seconds without progress after which the other side counts as lost.
_SILENCE = 30.0

#: Maximum number of bytes of a request, and maximum number of connections that are served at a time. Further
#: connections wait.
_MOST_BYTES = 4 << 20
_MOST_LINES = 64

#: Number of seconds until the next connection is accepted after this has failed, for example for too many open files.
_ACCEPT_AGAIN = 0.1


P = ParamSpec("P")
T = TypeVar("T")

#: An offset in a file, and a number of bytes.
Part = tuple[int, int]


class Incoming(Protocol):
    """The memory that receives one copy of a rank's state."""

    @property
    def tensors(self) -> memoryview:
        """The memory into which the tensors of the arriving copy of a rank's state are written."""

    def seal(self, record: bytes, objects: bytes) -> None:
        """Store the rest of the copy (everything but tensors), and mark the copy as complete."""

    def close(self) -> None:
        """Release the memory, even if only a part of the copy has arrived: an incomplete copy is never used."""


class Store(Protocol):
    """Keeps copies of the states (model, optimizer and more) that ranks of other nodes have saved as checkpoints.

    Several threads may call the methods of one store at the same time.
    """

    def reserve(self, copy: Copy) -> Incoming:
        """Make room for a copy of a rank's state. Raise an ``OSError`` if there is no room."""

    def path_of(self, path: str) -> str:
        """Return ``path`` if ranks of other nodes may read this file, and raise an ``OSError`` if they may not."""


class PeerServer(threading.Thread):
    """Receives copies of the states of other nodes' ranks, and sends parts of states on request, until :meth:`close`.

    Args:
        listener: the listening socket, which the server closes at the end.
        key: the certificate, the private key and the token that all nodes of the run share.
        store: keeps the copies of states that this node receives.
    """

    def __init__(self, listener: socket.socket, key: PeerKey, store: Store) -> None:
        super().__init__(name="distributor-peers", daemon=True)
        self._listener = listener
        self._context = tls.server_context(key.certificate, key.private)
        self._token = key.token
        self._store = store
        self._places = threading.BoundedSemaphore(_MOST_LINES)
        self._closed = threading.Event()

    def run(self) -> None:
        """Accept connections from ranks of other nodes until :meth:`close`."""
        while True:
            self._places.acquire()
            try:
                line, _ = self._listener.accept()
            except OSError:  # the server was closed, this process has too many open files, or the client has left
                self._places.release()
                if self._closed.wait(_ACCEPT_AGAIN):
                    return
                continue
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. Requests that are being served go on until they are done or the process ends."""
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
    """This node cannot keep a copy of a rank's state, or lacks the state that a rank of another node asks for."""


def _ask_store(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that reads or writes states on this node. If the function fails, raise a ``_StoreError``.

    The caller can thus distinguish a failure on this node, such as lack of memory for a copy, from a failure of the
    connection to the other node, which raises an ``OSError``.

    Raises:
        _StoreError: ``call`` has raised an ``OSError``. Both errors have the same text, which the server sends to the
            rank that made the request.
    """
    try:
        return call(*args, **kwargs)
    except OSError as error:
        raise _StoreError(str(error)) from None


class _Mapped:
    """A memory-mapped file that contains either the tensors of a rank's state or everything else in the state.

    Args:
        path: path of the file.

    Raises:
        OSError: the file is empty or cannot be read.
    """

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
        """Check that the given parts (each an offset and a number of bytes) lie within the file.

        Raises:
            OSError: a part begins before the file or ends after it.
        """
        if not all(offset >= 0 and size >= 0 and offset + size <= len(self._map) for offset, size in parts):
            raise OSError("the requested bytes of a rank's state are not all within the file that contains the state")

    def send(self, parts: Sequence[Part], line: socket.socket) -> None:
        """Send the given parts of the mapped file, which contains a rank's state, over a connection."""
        with memoryview(self._map) as whole:
            for offset, size in parts:
                for start in range(offset, offset + size, PIECE):
                    with whole[start : min(start + PIECE, offset + size)] as piece:
                        line.sendall(piece)


def send_copy(peer: Endpoint, slot: str, record: bytes, objects: bytes, path: str, parts: Sequence[Part]) -> None:
    """Send a rank's state to the agent of another node, and wait until the agent has it.

    Args:
        peer: where the agent of the other node listens.
        slot: the name that the file of tensors gets on the other node.
        record: describes the state that is sent: its checkpoint and tensors.
        objects: the rank's state apart from the tensors.
        path: the file on this node that contains the state's tensors.
        parts: the parts of this file that are sent, each as an offset and a number of bytes.

    Raises:
        OSError: the agent cannot be reached or has no room for the state.
        ValueError: the agent's answer is not a valid message.
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
    """Return the given parts of a file that the agent of another node keeps, joined in the order of ``parts``.

    Args:
        peer: where the agent of the other node listens.
        path: path of the file on the other node.
        parts: the parts of the file to return, each as an offset and a number of bytes.

    Raises:
        OSError: the agent cannot be reached or has no such file.
        ValueError: the agent's answer is not a valid message.
    """
    data = bytearray(sum(size for _, size in parts))
    with connect(peer) as line:
        line.settimeout(_SILENCE)
        line.sendall(pack(Recall(path, tuple(parts))))
        _expect(Proceed, line)
        fill(line, memoryview(data))
    return data


def _expect(kind: type[Message], line: socket.socket) -> None:
    """Read the answer of another node's agent to the request that was sent over ``line``.

    Raises:
        OSError: the agent has refused the request, the connection has ended, or the answer is not of the given kind.
    """
    answer = read(line)
    if isinstance(answer, Refused):
        raise OSError(answer.why)
    if not isinstance(answer, kind):
        raise ConnectionError(f"unexpected answer from the other node: {answer}")
