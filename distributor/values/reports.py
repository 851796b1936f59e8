"""Reports of ranks about their training: their form on the way to the driver, and how many are kept.

A rank appends each report to a file, which its agent sends like output. Once they exceed :func:`room`, they are
thinned out evenly: the rank writes every second, then every fourth, and the driver drops earlier ones alike.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Maximum number of bytes of one report.
LONGEST = 64 << 10

#: Bytes kept of all ranks' reports in an attempt, and the most and the least for one rank. The least always holds.
_OF_RUN, _MOST, _LEAST = 32 << 20, 8 << 20, 64 << 10

#: Whole numbers in reports are smaller than the first; the second is the largest ``stage``.
_LARGEST, _LAST_STAGE = 1 << 63, 62


@dataclass(frozen=True)
class Report:
    """What a rank tells in one call of ``runtime.report``: a step, and numbers by name."""

    number: int  # of reports that the rank has made before in this attempt
    stage: int  # how often the rank has halved the share of reports that it writes
    attempt: int
    time: float  # seconds since the epoch
    step: int | None
    total_steps: int | None
    values: Mapping[str, float] = field(default_factory=dict)


def room(world_size: int) -> int:
    """Return the number of bytes of reports that are kept for each rank, in each attempt.

    >>> room(1), room(16), room(10_000)
    (8388608, 2097152, 65536)
    """
    return max(_LEAST, min(_MOST, _OF_RUN // world_size))


def pack(report: Report) -> bytes:
    """Return a report as a line of JSON.

    >>> pack(Report(0, 0, 0, 1.5, 7, None, {"loss": 0.25}))
    b'[0,0,0,1.5,7,null,{"loss":0.25}]\\n'
    """
    line = [report.number, report.stage, report.attempt, report.time, report.step, report.total_steps, report.values]
    return _encode(line).encode() + b"\n"


def is_number(value: object) -> bool:
    """Return whether a value can be reported as it is: a float, or a whole number of 64 bits."""
    return type(value) is float or (type(value) is int and -_LARGEST < value < _LARGEST)


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def parse(line: bytes) -> Report | None:
    """Return the report in a line; ``None`` if the line is not a report, for example because the disk was full.

    >>> parse(pack(Report(0, 0, 0, 1.5, 7, None, {"loss": 0.25}))).values
    {'loss': 0.25}
    >>> parse(b'[0,0,0,"now",7,null,{}]')
    """
    try:
        number, stage, attempt, time, step, total, values = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    counts = (number, stage, attempt, *(each for each in (step, total) if each is not None))
    if not all(type(each) is int and abs(each) < _LARGEST for each in counts) or min(number, stage, attempt) < 0:
        return None
    if stage > _LAST_STAGE or not isinstance(values, dict) or not all(map(is_number, (time, *values.values()))):
        return None
    interned = {sys.intern(name): value for name, value in values.items()}  # all reports have the same few names
    return Report(number, stage, attempt, float(time), step, total, interned)


@dataclass(frozen=True)
class Committed:
    """Rank 0's report that a checkpoint has been committed."""

    attempt: int
    time: float  # seconds since the epoch
    step: int
    path: str  # folder or URL


#: The first element of a line about a checkpoint. Lines of reports begin with a number.
_COMMITTED = "checkpoint"


def pack_committed(told: Committed) -> bytes:
    """Return the report of a committed checkpoint as a line.

    >>> pack_committed(Committed(0, 1.5, 7, "/runs/step-7"))
    b'["checkpoint",0,1.5,7,"/runs/step-7"]\\n'
    """
    return _encode([_COMMITTED, told.attempt, told.time, told.step, told.path]).encode() + b"\n"


def parse_committed(line: bytes) -> Committed | None:
    """Return the report of a committed checkpoint in a line; ``None`` if the line is about something else.

    >>> parse_committed(pack_committed(Committed(0, 1.5, 7, "/runs/step-7"))).step
    7
    """
    found = _elements(line, _COMMITTED, 4)
    if found is None:
        return None
    attempt, time, step, path = found
    whole = all(type(each) is int and 0 <= each < _LARGEST for each in (attempt, step))
    if not whole or not is_number(time) or type(path) is not str:
        return None
    return Committed(attempt, float(time), step, path)


def _elements(line: bytes, kind: str, number: int) -> list[Any] | None:
    """Return the ``number`` values that follow ``kind`` in a line; ``None`` if the line is something else."""
    if not line.startswith(f'["{kind}",'.encode()):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found[1:] if isinstance(found, list) and len(found) == number + 1 else None


@dataclass(frozen=True)
class Spent:
    """The time that a rank has spent in a call that saves or loads a checkpoint."""

    attempt: int
    what: str  # "saving" or "loading"
    seconds: float


_SPENT = "spent"


def pack_spent(told: Spent) -> bytes:
    """Return the time as a line.

    >>> pack_spent(Spent(0, "saving", 0.25))
    b'["spent",0,"saving",0.25]\\n'
    """
    return _encode([_SPENT, told.attempt, told.what, told.seconds]).encode() + b"\n"


def parse_spent(line: bytes) -> Spent | None:
    """Return the time in a line; ``None`` if the line is about something else.

    >>> parse_spent(pack_spent(Spent(0, "saving", 0.25))).seconds
    0.25
    """
    found = _elements(line, _SPENT, 3)
    if found is None:
        return None
    attempt, what, seconds = found
    whole = type(attempt) is int and 0 <= attempt < _LARGEST
    if not whole or what not in ("saving", "loading") or not is_number(seconds):
        return None
    return Spent(attempt, what, float(seconds)) if 0 <= seconds < _LARGEST else None


@dataclass(frozen=True)
class Warned:
    """A warning of a rank that the driver shows, whichever ranks' lines it shows."""

    attempt: int
    text: str


_WARNED, _LONGEST_WARNING = "warning", 4000


def pack_warned(told: Warned) -> bytes:
    """Return a warning as a line.

    >>> pack_warned(Warned(0, "step 3 is damaged"))
    b'["warning",0,"step 3 is damaged"]\\n'
    """
    return _encode([_WARNED, told.attempt, told.text[:_LONGEST_WARNING]]).encode() + b"\n"


def parse_warned(line: bytes) -> Warned | None:
    """Return the warning in a line; ``None`` if the line is about something else.

    >>> parse_warned(pack_warned(Warned(0, "step 3 is damaged"))).text
    'step 3 is damaged'
    """
    found = _elements(line, _WARNED, 2)
    if found is None:
        return None
    attempt, text = found
    whole = type(attempt) is int and 0 <= attempt < _LARGEST
    return Warned(attempt, text) if whole and type(text) is str and len(text) <= _LONGEST_WARNING else None


@dataclass(frozen=True)
class Progress:
    """The progress of training, according to the lowest rank that reports steps.

    Attributes:
        step: the step that the rank reported last.
        total: total number of steps; ``None`` if the rank did not report it.
        rate: recent number of steps per second; ``None`` until it can be computed.
    """

    step: int
    total: int | None = None
    rate: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """Number of seconds that the remaining steps take at this rate; ``None`` if rate or total is not known."""
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.step) / self.rate
