"""The board: a small file through which a node's ranks and its agent arrange that all ranks stop at the same step.

Before a rank goes on with a step, it *names* the step: it writes the step's number to the board, a file that the ranks
share with the agent. The agent writes the step at which the driver proposes to stop. A rank locks the file (fcntl(2))
while it names a step and reads the proposal, and the agent locks it while it reads the named steps and writes the
proposal. If both write at almost the same time, the second of the two therefore sees what the first has written. Other
entries, such as whether a rank got SIGTERM, are read and written without the lock.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distributor.machine.own_file import OwnFile

#: The number that stands for "no step".
NONE = -1

#: The layouts of the file's head and of each rank's part: the fields of :class:`Head` and :class:`Seat`, as numbers.
_HEAD = _SEAT = struct.Struct("=qqqq")

_NUMBER = struct.Struct("=q")


@dataclass(frozen=True)
class Head:
    """What the agent has written to the board, a file that a node's agent and ranks share.

    Attributes:
        proposed: the step at which all ranks stop if all nodes agree; :data:`NONE` if none is proposed.
        agreed: the step at which all nodes have agreed to stop; :data:`NONE` if there is none yet.
        linked: whether the agent could send messages to the driver when the agent created the board. If not, ranks do
            not turn SIGTERM into a stop of all ranks at a common step.
        ending: whether the agent is stopping the ranks.
    """

    proposed: int = NONE
    agreed: int = NONE
    linked: bool = False
    ending: bool = False


@dataclass(frozen=True)
class Seat:
    """What one rank has written to the board, a file that a node's agent and ranks share.

    Attributes:
        step: the last step that the rank has passed to ``should_stop``; :data:`NONE` before the first call.
        halted: the step at which ``should_stop`` told the rank to stop; :data:`NONE` if the rank was not told to stop.
        preempted: whether the rank got SIGTERM.
        handles: whether the rank takes SIGTERM as a request to stop at a step common to all ranks, and therefore does
            not end at once when it gets SIGTERM.
    """

    step: int = NONE
    halted: int = NONE
    preempted: bool = False
    handles: bool = False


def create(path: Path, ranks: int, *, linked: bool) -> None:
    """Create or replace a board, the file that a node's ranks and its agent share.

    Args:
        path: path of the board's file.
        ranks: number of ranks of the node.
        linked: whether the agent, which calls this function, can send messages to the driver now.

    Raises:
        OSError: the board cannot be written.
    """
    head = _HEAD.pack(NONE, NONE, linked, False)
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(head + _SEAT.pack(NONE, NONE, False, False) * ranks)
    os.replace(new, path)


class Board:
    """The board: a small file through which a node's ranks and its agent arrange that all ranks stop at the same step.

    Each rank and the agent read and write the board's file through an object of this class, which opens the file when
    it first needs it.

    Args:
        path: path of the board's file, which :func:`create` has written.
    """

    def __init__(self, path: Path) -> None:
        self._file = OwnFile(path, os.O_RDWR)

    def close(self) -> None:
        """Close the board's file, if this process has opened it."""
        self._file.close()

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Lock the board's file in the ``with`` block. This keeps out only processes that lock the file, too.

        Raises:
            BlockingIOError: another process holds the lock, and ``wait`` is ``False``.
            OSError: the board's file cannot be opened or locked, for example because it was removed.
        """
        descriptor = self._file.descriptor()
        fcntl.lockf(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            fcntl.lockf(descriptor, fcntl.LOCK_UN)

    def head(self) -> Head:
        """Return what the agent has written to the board's file, such as the step proposed for the stop."""
        proposed, agreed, linked, ending = _HEAD.unpack(os.pread(self._file.descriptor(), _HEAD.size, 0))
        return Head(proposed, agreed, bool(linked), bool(ending))

    def seats(self) -> list[Seat]:
        """Return what each rank has written to the board's file, in the order of local ranks."""
        descriptor = self._file.descriptor()
        data = os.pread(descriptor, os.fstat(descriptor).st_size - _HEAD.size, _HEAD.size)
        return [Seat(step, halted, bool(got), bool(handles)) for step, halted, got, handles in _SEAT.iter_unpack(data)]

    def propose(self, step: int) -> None:
        self._write(0, step)

    def agree(self, step: int) -> None:
        self._write(1, step)

    def end(self) -> None:
        """Tell the ranks that the agent is stopping them."""
        self._write(3, True)

    def name_step(self, local_rank: int, step: int) -> None:
        self._write(4 + 4 * local_rank, step)

    def halt(self, local_rank: int, step: int) -> None:
        self._write(5 + 4 * local_rank, step)

    def preempt(self, local_rank: int) -> None:
        self._write(6 + 4 * local_rank, True)

    def handle(self, local_rank: int, handles: bool) -> None:
        self._write(7 + 4 * local_rank, handles)

    def _write(self, place: int, number: int) -> None:
        os.pwrite(self._file.descriptor(), _NUMBER.pack(number), place * _NUMBER.size)
