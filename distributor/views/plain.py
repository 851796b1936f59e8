"""Occasional lines, for outputs that keep everything: files, pipes, the log of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distributor.job import Status
from distributor.views import Packed, Shown
from distributor.views.snapshot import Snapshot, folded, state
from distributor.wording import duration, size

#: Seconds for which a run does not change before that is worth a line.
_PATIENCE = 3.0

#: Seconds from one line to the next that says something else of the same status.
_PAUSE = 10.0

#: Seconds from one line of a run that goes on to the next.
_STILL_THERE = 600.0

#: Lines of ranks that such a line shows.
_LINES = 4


class PlainView:
    """Says what takes long."""

    interval = 1.0
    announces = True

    def __init__(self) -> None:
        self._said = ""
        self._status: Status | None = None
        self._due = 0.0

    @contextmanager
    def packing(self, folder: str) -> Iterator[Packed]:
        """Says so once if it takes long."""
        began, said = time.monotonic(), False

        def packed(done: int, total: int) -> None:
            nonlocal said
            if not said and time.monotonic() - began > _PATIENCE and sys.stderr is not None:
                said = True
                print(f"[distributor] packing {folder}: {size(total)}", file=sys.stderr, flush=True)

        yield packed

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
        """A line where one is due."""
        if snapshot.ended or snapshot.since < _PATIENCE:
            return Shown()
        if snapshot.status is not self._status:
            self._status = snapshot.status
            # That ranks run is to be seen by what they write.
            self._due = _STILL_THERE if snapshot.status is Status.RUNNING else 0.0
        text = state(snapshot)
        if snapshot.since < self._due or (text == self._said and snapshot.status is not Status.RUNNING):
            return Shown()
        self._said = text
        notes = [f"run {snapshot.run_id}: {text}"]
        if snapshot.status is Status.RUNNING:
            notes = [f"{notes[0]} after {duration(snapshot.seconds)}"]
            notes += [f"  {ranks}: {line}" for ranks, line in folded(snapshot.lines, _LINES)]
            self._due = snapshot.since + _STILL_THERE
        else:
            self._due = snapshot.since + _PAUSE
        return Shown(notes=tuple(notes))

    def show_again(self, snapshot: Snapshot) -> bool:
        """Lines stay as they are."""
        return False
