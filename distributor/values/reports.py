"""Reports of ranks about their training: their form on the way to the driver, and how many are kept.

A rank appends each report to a file, which its agent sends like output. Once they exceed :func:`room`, they are
thinned out evenly: the rank writes every second, then every fourth, and the driver drops earlier ones alike.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from distributor.values import codec
from distributor.values.codec import Between, Count, Length, Seconds

#: Maximum number of bytes of one report.
LONGEST = 64 << 10

#: Bytes kept of all ranks' reports in an attempt, and the most and the least for one rank. The least always holds.
_OF_RUN, _MOST, _LEAST = 32 << 20, 8 << 20, 64 << 10

_LONGEST_TEXT = 4000  # characters of a warning or reason

_LARGEST = 1 << 63  # whole numbers in reports are smaller


def is_number(value: object) -> bool:
    """Return whether a value can be reported as it is: a float, or a whole number of 64 bits."""
    return type(value) is float or (type(value) is int and -_LARGEST < value < _LARGEST)


class Number:
    """The bound of what can be reported."""

    def check(self, value: object) -> None:
        if not is_number(value):
            raise ValueError(f"{value!r} is not a number")


Step = Annotated[int, Number()]


@dataclass(frozen=True)
class Report:
    """What a rank tells in one call of ``runtime.report``: a step, and numbers by name."""

    number: Count  # of reports that the rank has made before in this attempt
    stage: Annotated[int, Between(0, 62)]  # how often the rank has halved the share of reports that it writes
    attempt: Count
    time: float  # seconds since the epoch
    step: Step | None
    total_steps: Step | None
    values: Mapping[str, Annotated[Any, Number()]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackedReport(Report):
    """A report of what a Trainer has logged to the run in MLflow as well."""


@dataclass(frozen=True)
class Committed:
    """Rank 0's report that a checkpoint has been committed."""

    attempt: Count
    time: float  # seconds since the epoch
    step: Count
    path: str  # folder or URL


@dataclass(frozen=True)
class Resumed:
    """Rank 0's report where the training of an attempt continues. ``print`` shows it as a sentence.

    Attributes:
        attempt: number of the attempt.
        step: the step that was loaded; ``None`` if there was no checkpoint.
        path: folder or URL of the checkpoint; of all checkpoints if there was none.
        time: when the checkpoint was saved, in seconds since the epoch; ``None`` if there was none, or if the state was
            in memory.
    """

    attempt: Count
    step: Count | None
    path: str
    time: float | None = None

    def __str__(self) -> str:
        if self.step is None:
            return f"no checkpoint in {self.path}: begins at step 0"
        saved = "" if self.time is None else time.strftime(", saved at %Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"continues from step {self.step} of {self.path}{saved}"


@dataclass(frozen=True)
class Unsaved:
    """Rank 0's report that a checkpoint could not be committed."""

    attempt: Count
    step: Count
    why: Annotated[str, Length(_LONGEST_TEXT)]


@dataclass(frozen=True)
class Spent:
    """The time that a rank has spent in a call that saves or loads a checkpoint."""

    attempt: Count
    what: Literal["saving", "loading", "data"]
    seconds: Seconds


@dataclass(frozen=True)
class Warned:
    """A warning of a rank that the driver shows, whichever ranks' lines it shows."""

    attempt: Count
    text: Annotated[str, Length(_LONGEST_TEXT)]


Line = Report | Committed | Resumed | Unsaved | Spent | Warned

#: By the first element of a line; lines of reports begin with a number.
_KINDS: dict[str, type[Line]] = {
    "tracked": TrackedReport,
    "checkpoint": Committed,
    "resumed": Resumed,
    "unsaved": Unsaved,
    "spent": Spent,
    "warning": Warned,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def room(world_size: int) -> int:
    """Return the number of bytes of reports that are kept for each rank, in each attempt.

    >>> room(1), room(16), room(10_000)
    (8388608, 2097152, 65536)
    """
    return max(_LEAST, min(_MOST, _OF_RUN // world_size))


def pack(record: Line) -> bytes:
    """Return a report as a line of JSON.

    >>> pack(Report(0, 0, 0, 1.5, 7, None, {"loss": 0.25}))
    b'[0,0,0,1.5,7,null,{"loss":0.25}]\\n'
    >>> pack(Committed(0, 1.5, 7, "/runs/step-7"))
    b'["checkpoint",0,1.5,7,"/runs/step-7"]\\n'
    """
    values = list(vars(record).values())
    return _encode(values if type(record) is Report else [_NAMES[type(record)], *values]).encode() + b"\n"


def cut(text: str) -> str:
    """Return as much of a text as a report takes."""
    return text[:_LONGEST_TEXT]


def parse(line: bytes) -> Line | None:
    """Return the report in a line; ``None`` if the line is not a report, for example because the disk was full.

    >>> parse(pack(Report(0, 0, 0, 1.5, 7, None, {"loss": 0.25}))).values
    {'loss': 0.25}
    >>> parse(b'[0,0,0,"now",7,null,{}]')
    """
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop(0)] if isinstance(values[0], str) else Report
        if issubclass(kind, Report):  # all reports have the same few names
            values[-1] = {sys.intern(name): number for name, number in values[-1].items()}
        record: Line = codec.build(kind, dict(zip(kind.__dataclass_fields__, values, strict=True)))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
    return record


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
