"""A view that prints occasional lines, for outputs that keep everything: files, pipes, the log of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distributor.display.snapshot import Snapshot, folded, reported, state, timed
from distributor.display.view import Packed, Shown
from distributor.text import escapes
from distributor.text.wording import duration, size
from distributor.values.job import Status

#: Number of seconds that a status, or the packing of a project folder, must last before a line about it is shown.
_PATIENCE = 3.0

#: Minimum number of seconds between lines of the same status. An unchanged line is repeated less and less often.
_PAUSE = 10.0

#: Number of seconds between lines while ranks run, and the longest time between other repeated lines.
_STILL_THERE = 600.0

#: Maximum number of ranks' lines to show below the status line of a run in progress.
_LINES = 4


class PlainView:
    """Shows a line about what a run does, such as waiting for slots, once the run's status has lasted a few seconds.

    While ranks run, it shows a line every ten minutes.
    """

    interval = 1.0
    announces = True

    def __init__(self) -> None:
        self._said = ""
        self._status: Status | None = None
        self._last = 0.0  # how long the status had lasted when its last line was shown

    @contextmanager
    def packing(self, folder: str) -> Iterator[Packed]:
        """Print one line if the packing of a project folder takes a long time."""
        began, said = time.monotonic(), False

        def packed(done: int, total: int) -> None:
            nonlocal said
            if not said and time.monotonic() - began > _PATIENCE and sys.stderr is not None:
                said = True
                print(f"[distributor] packing {folder}: {size(total)}", file=sys.stderr, flush=True)

        yield packed

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
        """Return a line about the run if one is due. While ranks run, the last lines of some ranks follow it."""
        if snapshot.ended or snapshot.since < _PATIENCE:
            return Shown()
        if snapshot.status is not self._status:
            self._status, self._said, self._last = snapshot.status, "", 0.0
        text = state(snapshot)
        if snapshot.since < self._due(text):
            return Shown()
        self._said, self._last = text, snapshot.since
        notes = [f"run {snapshot.label}: {escapes.plain(timed(snapshot))}"]
        if snapshot.status is Status.RUNNING:
            told = reported(snapshot)
            notes = [f"{notes[0]} after {duration(snapshot.seconds)}{f': {escapes.plain(told)}' if told else ''}"]
            notes += [f"  {ranks}: {escapes.plain(line)}" for ranks, line in folded(snapshot.lines, _LINES)]
        return Shown(notes=tuple(notes))

    def _due(self, text: str) -> float:
        """Return for how many seconds the status must have lasted before a line with this text is printed."""
        if self._status is Status.RUNNING:  # progress is visible from what the ranks write
            return self._last + _STILL_THERE
        if text != self._said:
            return self._last + (_PAUSE if self._said else 0.0)
        return self._last + min(_STILL_THERE, max(_PAUSE, self._last))

    def show_again(self, snapshot: Snapshot) -> bool:
        """Return ``False``: the run cannot be shown in a second place, because printed lines cannot be updated."""
        return False
