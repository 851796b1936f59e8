"""What a Spark task and the processes of a model say to each other: pickles of protocol 5, with arrays beside them
or in memory that both share.

All are processes of one user on one machine, and the socket is in a private folder. Standard library only: it travels
into Spark's workers by value.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distributor.machine import processes
from distributor.scoring.row_memory import RowMemory

T = TypeVar("T")

#: What is in the folder of a model's server beside what :mod:`distributor.machine.model_servers` names: the task that
#: starts it writes these files.
LOG, CALL, PATHS, PACKAGE = "log", "call", "paths", "package.zip"

_HEAD = "!?QQ"  # whether arrays are in shared memory, length of the pickle, number of arrays

_LARGE = 1 << 16  # bytes of arrays that go through shared memory

_LONGEST_LOG = 2000  # bytes of what the model has written that an error quotes

#: What a task's connection to the server wants, before its :data:`LIMITS`; see :mod:`distributor.scoring.model_server`.
SCORE = b"s"

LIMITS = "!dd"  # seconds for the load and for each batch, and for which an unused model is kept

#: What the server says next on it: a connection to a process that computes, or a :class:`ProcessEnded`.
CONNECTED, ENDED = b"c", b"e"


@dataclass(frozen=True)
class ScoreRequest:
    """Rows to score."""

    inputs: dict[str, Any]  # an array or a list for each input, all of the same length
    rows: int
    outputs: tuple[str, ...]  # names
    batch_rows: int  # the model gets at most as many at once
    skips: bool  # whether rows that fail are left out, in place of an error
    pads: bool = False  # whether the model gets exactly ``batch_rows`` each time
    is_alone: bool = False  # whether no other task's rows may be computed with these


@dataclass(frozen=True)
class ScoreAnswer:
    """The outputs of the rows that did not fail, in their order."""

    outputs: tuple[Any, ...] = ()  # an array or a list for each output
    failed: dict[int, str] = field(default_factory=dict)  # by row of the request
    error: str = ""  # why there are no outputs at all
    again: bool = False  # something fails: the rows are wanted once more, and alone; the model may have changed these
    halved_rows: int = 0  # of the largest batch that was halved, since the GPU's memory did not suffice


@dataclass(frozen=True)
class Loaded:
    """The model is loaded, or cannot be."""

    error: str = ""


@dataclass(frozen=True)
class Born:
    """A process that computes has begun."""

    pid: int


@dataclass(frozen=True)
class ProcessEnded:
    """The process that loaded the model, or computed for a task, has ended."""

    text: str  # how, such as "was killed by SIGKILL"
    is_final: bool = False  # another process would end in the same way
    is_whole: bool = False  # the text is a whole sentence
    was_computing: bool = True  # rows of this task, or it was loading
    log: str = ""  # what it has written


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Keep the memory of an array as it is, also if its axes have another order there, as in pictures."""
        if isinstance(value, type) or not hasattr(value, "strides") or value.flags.forc:
            return NotImplemented
        order = sorted(range(value.ndim), key=lambda axis: -int(value.strides[axis]))
        inner = value.transpose(order)
        if not inner.flags.c_contiguous:
            return NotImplemented
        return type(value).transpose, (inner, [order.index(axis) for axis in range(value.ndim)])


def send(connection: socket.socket, message: Any, memory: RowMemory | None = None) -> None:
    """Send a message, large arrays in ``memory``; ConnectionError if the other end has closed the connection."""
    pickled, parts = _pickled(message)
    shared = memory is not None and sum(part.nbytes for part in parts) >= _LARGE
    opened = memory.write(parts) if memory is not None and shared else []
    try:
        socket.send_fds(connection, [_head(shared, pickled, parts)], opened)
    finally:
        for each in opened:
            os.close(each)
    for part in [pickled, *([] if shared else parts)]:
        connection.sendall(part)


class Outgoing:
    """A message to a connection that may be full: its other end may wait for others before it reads."""

    def __init__(self, message: Any) -> None:
        pickled, parts = _pickled(message)
        self._parts = [memoryview(_head(False, pickled, parts)), pickled, *parts]
        self._is_copied = False

    def send(self, connection: socket.socket) -> bool:
        """Send what the connection takes, and return whether that was all. What is left may be changed meanwhile."""
        while self._parts:
            try:
                sent = connection.send(self._parts[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not self._is_copied:
                    self._parts = [memoryview(bytes(part)) for part in self._parts]
                    self._is_copied = True
                return False
            self._parts[0] = self._parts[0][sent:]
            if not self._parts[0]:
                del self._parts[0]
        return True


def _pickled(message: Any) -> tuple[memoryview, list[memoryview]]:
    """Return the pickle of a message, and its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    # Plain values: a worker cannot import the class, in which fields() finds none if PySpark 3.5 has pickled it.
    plain = [*vars(message).values()]
    stream = io.BytesIO()
    _Pickler(stream, 5, buffer_callback=buffers.append).dump(plain)
    return stream.getbuffer(), [each.raw() for each in buffers]


def _head(shared: bool, pickled: memoryview, parts: list[memoryview]) -> bytes:
    lengths = [part.nbytes for part in parts]
    return struct.pack(f"{_HEAD}{len(lengths)}Q", shared, len(pickled), len(lengths), *lengths)


def receive(connection: socket.socket, kind: type[T], memory: RowMemory | None = None) -> T:
    """Return the next message. EOFError, ConnectionError: the other end has closed the connection."""
    head, opened, flags, _ = socket.recv_fds(connection, struct.calcsize(_HEAD), 1)
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for each in opened:
        with open(each, "rb") as file:
            if memory is not None:
                memory.open(file.fileno())
    shared, length, count = struct.unpack(_HEAD, head + _read(connection, struct.calcsize(_HEAD) - len(head)))
    lengths = struct.unpack(f"!{count}Q", _read(connection, 8 * count))
    pickled = _read(connection, length)
    buffers = memory.read(lengths) if memory is not None and shared else [_read(connection, each) for each in lengths]
    return kind(*pickle.loads(pickled, buffers=buffers))


def end_of_log(folder: str) -> str:
    """Return the end of what the processes of a model have written."""
    with suppress(OSError), open(os.path.join(folder, LOG), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LOG))
        return file.read().decode(errors="replace").strip()
    return ""


def how_ended(code: int) -> str:
    """Return how a process has ended, as the end of a sentence about it.

    >>> how_ended(3), how_ended(-11)
    ('ended with exit status 3', 'was killed by SIGSEGV')
    """
    return f"ended with exit status {code}" if code >= 0 else f"was killed by {processes.signal_name(-code)}"


def _read(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return content
