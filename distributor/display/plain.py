"""A view that prints occasional lines, for outputs that keep everything: files, pipes, the log of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distributor.display.snapshot import Snapshot, folded, reported, state, timed
from distributor.display.trials import TrialsSnapshot
from distributor.display.view import Packed, Shown
from distributor.text import escapes
from distributor.text.wording import duration, size
from distributor.values.job import Status

#: Seconds that a status, or packing, must last before a line about it is shown.
_PATIENCE = 3.0

#: Seconds, at least, between lines of the same status. An unchanged line is repeated less and less often.
_PAUSE = 10.0

#: Seconds between lines while ranks run, and at most between other repeated lines.
_STILL_THERE = 600.0

_LINES = 4


class PlainView:
    """Shows a line about what a run does once this has lasted a few seconds, and every ten minutes while ranks run."""

    interval = 1.0
    announces = True

    def __init__(self) -> None:
        self._said = ""
        self._status: Status | None = None
        self._last = 0.0  # how long the status had lasted when its last line was shown

    @contextmanager
    def packing(self, folder: str) -> Iterator[Packed]:
        began, shown = time.monotonic(), False

        def packed(done: int, total: int) -> None:
            nonlocal shown
            if not shown and time.monotonic() - began > _PATIENCE and sys.stderr is not None:
                shown = True
                print(f"[distributor] packing {folder}: {size(total)}", file=sys.stderr, flush=True)

        yield packed

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
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
            metrics = reported(snapshot)
            notes = [f"{notes[0]} after {duration(snapshot.seconds)}{f': {escapes.plain(metrics)}' if metrics else ''}"]
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
        """Return ``False``: printed lines cannot be updated."""
        return False


class PlainTrials:
    """Shows nothing but the lines that its owner prints."""

    interval = 60.0
    announces = True

    def show(self, snapshot: TrialsSnapshot) -> None: ...

    def close(self, snapshot: TrialsSnapshot) -> None: ...
