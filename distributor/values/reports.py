"""What ranks report of their training: the form of a report on its way to the driver, and how many are kept.

A rank appends a line to a file for each report, and its agent sends the file on as it sends the rank's output. A rank
that reports more than there is :func:`room` for thins its reports out evenly: from then on it writes only every second
one, then every fourth, and so on, and the driver drops what it has of those between.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Largest number of bytes of one report.
LONGEST = 64 << 10

#: Number of bytes of reports that are kept of a whole run, and of one rank at most and at least.
_OF_RUN, _MOST, _LEAST = 32 << 20, 8 << 20, 64 << 10


@dataclass(frozen=True)
class Report:
    """One report of a rank.

    Attributes:
        number: how many reports the rank had made before in this attempt.
        stage: how often the rank had doubled the distance between the reports that it writes.
        attempt: number of the attempt.
        time: when it was made, in seconds since the epoch.
        step: the step of the training; ``None`` if the rank did not say.
        total_steps: number of steps of the whole training; ``None`` if the rank did not say.
        values: what was measured.
    """

    number: int
    stage: int
    attempt: int
    time: float
    step: int | None
    total_steps: int | None
    values: Mapping[str, float] = field(default_factory=dict)


def room(world_size: int) -> int:
    """Return the number of bytes of reports that are kept of each rank, in each attempt.

    >>> room(1), room(16), room(10_000)
    (8388608, 2097152, 65536)
    """
    return max(_LEAST, min(_MOST, _OF_RUN // world_size))


def pack(report: Report) -> bytes:
    """Return a report as a line.

    >>> pack(Report(0, 0, 0, 1.5, 7, None, {"loss": 0.25}))
    b'[0,0,0,1.5,7,null,{"loss":0.25}]\\n'
    """
    line = [report.number, report.stage, report.attempt, report.time, report.step, report.total_steps, report.values]
    return _encode(line).encode() + b"\n"


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def parse(line: bytes) -> Report | None:
    """Return the report that a line holds; ``None`` if it holds none, which a rank on a full disk may cause.

    >>> parse(pack(Report(0, 0, 0, 1.5, 7, None, {"loss": 0.25}))).values
    {'loss': 0.25}
    >>> parse(b'[0,0,0,"now",7,null,{}]')
    """
    try:
        number, stage, attempt, time, step, total, values = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    counts = (number, stage, attempt, *(each for each in (step, total) if each is not None))
    if not all(type(each) is int and abs(each) < 1 << 63 for each in counts) or min(number, stage, attempt) < 0:
        return None
    if not isinstance(values, dict) or not all(type(each) in (int, float) for each in (time, *values.values())):
        return None
    interned = {sys.intern(name): value for name, value in values.items()}  # the same few in all reports
    return Report(number, stage, attempt, float(time), step, total, interned)


@dataclass(frozen=True)
class Progress:
    """How far a training has come, as the lowest rank that reports steps tells.

    Attributes:
        step: the step that it reported last.
        total: number of steps in all; ``None`` if it did not say.
        rate: number of steps per second of late; ``None`` until it can be told.
    """

    step: int
    total: int | None = None
    rate: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """Number of seconds until the last step at this rate; ``None`` if that is not known."""
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.step) / self.rate
