"""What a Spark task and the processes of a model say to each other: pickles of protocol 5, with arrays beside them.

All are processes of one user on one machine, and the socket is in a private folder. Standard library only: it travels
into Spark's workers by value.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from distributor.machine import processes

T = TypeVar("T")

#: What is in the folder of a model's server: the task that starts it writes the files that follow the socket.
LOCK, SOCKET, LOG, CALL, PATHS, PACKAGE = "lock", "socket", "log", "call", "paths", "package.zip"

_LONGEST_LOG = 2000  # characters of what the model has written that an error quotes

#: What a connection to the server wants; see :mod:`distributor.scoring.model_server`.
SCORE, RELEASE = b"s", b"r"

#: What the server says next on it: a connection to a process that computes, a :class:`ProcessEnded`, or that it ends.
CONNECTED, ENDED, RELEASED = b"c", b"e", b"r"


@dataclass(frozen=True)
class ScoreRequest:
    """Rows to score."""

    inputs: dict[str, Any]  # an array or a list for each input, all of the same length
    rows: int
    outputs: tuple[str, ...]  # names
    batch_rows: int  # the model gets at most as many at once
    skips: bool  # whether rows that fail are left out, in place of an error
    pads: bool = False  # whether the model gets exactly ``batch_rows`` each time


@dataclass(frozen=True)
class ScoreAnswer:
    """The outputs of the rows that did not fail, in their order."""

    outputs: tuple[Any, ...] = ()  # an array or a list for each output
    failed: dict[int, str] = field(default_factory=dict)  # by row of the request
    error: str = ""  # why there are no outputs at all


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


def send(connection: socket.socket, message: Any) -> None:
    """Send a message; OSError if the other end has closed the connection."""
    buffers: list[pickle.PickleBuffer] = []
    plain = [getattr(message, each.name) for each in fields(message)]  # a worker cannot import the class
    parts: list[Any] = [pickle.dumps(plain, 5, buffer_callback=buffers.append), *(each.raw() for each in buffers)]
    lengths = [memoryview(part).nbytes for part in parts]
    connection.sendall(struct.pack(f"!{len(lengths) + 1}Q", len(lengths), *lengths))
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket, kind: type[T]) -> T:
    """Return the next message. EOFError: the other end has closed the connection."""
    (count,) = struct.unpack("!Q", _read(connection, 8))
    lengths = struct.unpack(f"!{count}Q", _read(connection, 8 * count))
    pickled, *buffers = [_read(connection, length) for length in lengths]
    return kind(*pickle.loads(pickled, buffers=buffers))


def end_of_log(folder: str) -> str:
    """Return the end of what the processes of a model have written."""
    with suppress(OSError), open(os.path.join(folder, LOG), errors="replace") as file:
        return file.read()[-_LONGEST_LOG:].strip()
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
