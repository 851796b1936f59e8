"""A small file through which a node's ranks and its agent arrange that all ranks stop at the same step.

Before a rank goes on with a step, it *names* the step in the vote file. The agent writes the step at which the driver
proposes to stop. Each locks the file (fcntl(2)) while it writes its own step and reads the other's: the second of two
that write at almost the same time sees what the first has written. Other entries need no lock.
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

NONE = -1  # no step

_HEAD = _SEAT = struct.Struct("=qqqq")  # the fields of :class:`Head` and of each :class:`Vote`, as numbers

_NUMBER = struct.Struct("=q")


@dataclass(frozen=True)
class Head:
    """What the agent has written."""

    proposed: int = NONE  # all ranks stop there if all nodes agree
    agreed: int = NONE  # all nodes have agreed to stop there
    linked: bool = False  # the agent could reach the driver when it made the vote file; if not, ranks leave SIGTERM be
    ending: bool = False  # the agent is stopping the ranks


@dataclass(frozen=True)
class Vote:
    """What one rank has written."""

    step: int = NONE  # the last one that was passed to ``should_stop``
    halted: int = NONE  # the step at which ``should_stop`` told the rank to stop
    preempted: bool = False  # the rank got SIGTERM
    handles: bool = False  # SIGTERM asks all ranks to stop at one step, and does not end this one at once


def create(path: Path, ranks: int, *, linked: bool) -> None:
    """Create or replace a vote file. ``linked`` says whether the agent can send messages to the driver now."""
    head = _HEAD.pack(NONE, NONE, linked, False)
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(head + _SEAT.pack(NONE, NONE, False, False) * ranks)
    os.replace(new, path)


class VoteFile:
    """A vote file as a rank or the agent sees it. The file is opened when it is first needed."""

    def __init__(self, path: Path) -> None:
        self._file = OwnFile(path, os.O_RDWR)

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Keep out others that lock the file. BlockingIOError if one has (``wait=False``), OSError if it is gone."""
        descriptor = self._file.descriptor()
        fcntl.lockf(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            fcntl.lockf(descriptor, fcntl.LOCK_UN)

    def head(self) -> Head:
        proposed, agreed, linked, ending = _HEAD.unpack(os.pread(self._file.descriptor(), _HEAD.size, 0))
        return Head(proposed, agreed, bool(linked), bool(ending))

    def seats(self) -> list[Vote]:
        """Return what each rank has written, in the order of local ranks."""
        descriptor = self._file.descriptor()
        data = os.pread(descriptor, os.fstat(descriptor).st_size - _HEAD.size, _HEAD.size)
        return [Vote(step, halted, bool(got), bool(handles)) for step, halted, got, handles in _SEAT.iter_unpack(data)]

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
