"""Write a rank's reports to a file, which the node's agent sends to the driver. A rank never waits for the sending.

Each report is a line. The agent sends it at once over the channel, and again if the channel broke; at the end, what the
driver still lacks goes through Spark.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from distributor.errors import ConfigurationError
from distributor.machine.own_file import OwnFile
from distributor.text import notices
from distributor.text.wording import size
from distributor.values.checks import as_number, as_whole
from distributor.values.reports import (
    LONGEST,
    Committed,
    Report,
    Resumed,
    Spent,
    TrackedReport,
    Unsaved,
    Warned,
    cut,
    is_number,
    pack,
    room,
)


class Writer:
    """Writes the reports of one rank in one attempt."""

    def __init__(self, path: Path, room: int, attempt: int) -> None:
        self._file = OwnFile(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._room = room  # bytes of reports that are kept for the rank
        self._attempt = attempt
        self._lock = threading.RLock()  # a signal handler may report while it interrupts a report
        self._owner = os.getpid()
        self._number = self._stage = self._written = 0
        self._torn = False  # the last line is not complete
        self._left_out: dict[str, Report] = {}  # by metric, "" for the step: the last report, if it was left out
        self._begins = 0  # whether another's checkpoint was loaded (1), or this run's own were asked for (2)

    def add(self, values: Mapping[str, float], step: int | None, total_steps: int | None, *, tracked: bool) -> None:
        """Write a report, except in a fork of the rank. ConfigurationError if it is too long.

        Each time the kept reports exceed their room, the driver drops, and the rank leaves out, every second one: none
        is left out for good that is the last of a metric.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            number, self._number = self._number, self._number + 1
            kind = TrackedReport if tracked else Report
            report = kind(number, self._stage, self._attempt, time.time(), step, total_steps, values)
            names = ["", *values]
            if report.number & ((1 << self._stage) - 1):
                self._left_out.update(dict.fromkeys(names, report))
                return
            line = pack(report)
            if len(line) > LONGEST:
                raise ConfigurationError(
                    f"report() was given {size(len(line))}, but takes at most {size(LONGEST)}: report fewer values"
                )
            for name in names:
                self._left_out.pop(name, None)
            self._write(line)

    def committed(self, step: int, path: str) -> None:
        with self._lock:
            self._write(pack(Committed(self._attempt, time.time(), step, path)))

    def unsaved(self, step: int, why: str) -> None:
        with self._lock:
            self._write(pack(Unsaved(self._attempt, step, cut(why))))

    def resumed(self, step: int | None, path: str, saved: float | None, *, own: bool) -> Resumed | None:
        """Write where training begins, once: where the run's own checkpoints say or, before these, another's."""
        if self._begins > own:
            return None
        self._begins = 1 + own
        resumed = Resumed(self._attempt, step, path, saved)
        with self._lock:
            self._write(pack(resumed))
        return resumed

    def spent(self, what: Literal["saving", "loading", "data"], seconds: float) -> None:
        """Write how long a call that saves or loads a checkpoint has taken, except in a fork of the rank."""
        if os.getpid() == self._owner:
            with self._lock:
                self._write(pack(Spent(self._attempt, what, seconds)))

    def warned(self, text: str) -> bool:
        """Write a warning. Return ``False`` in a fork of the rank or on a full disk."""
        if os.getpid() != self._owner:
            return False
        with self._lock:
            return self._write(pack(Warned(self._attempt, cut(text))))

    def finish(self) -> None:
        """Write the last reports of metrics that :meth:`add` has left out: they show how training has ended."""
        if os.getpid() != self._owner:  # in a fork, nobody may be left to release the lock
            return
        with self._lock:
            left_out, self._left_out = self._left_out, {}
            names: dict[int, list[str]] = {}  # by the number of the report in which they were last
            for name, report in left_out.items():
                names.setdefault(report.number, []).append(name)
            for _, last in sorted(names.items()):
                report = left_out[last[0]]
                self._write(pack(replace(report, values={name: report.values[name] for name in last if name})))

    def _write(self, line: bytes) -> bool:
        """Append a line to the file of reports. Return ``False`` if the disk is full: the report is lost."""
        data = b"\n" + line if self._torn else line
        try:
            done = os.write(self._file.descriptor(), data)
        except OSError:
            return False
        self._torn = done < len(data)
        self._written += done
        if self._written > self._room:
            self._stage += 1
            self._written //= 2
        return not self._torn


_writer: Writer | None = None

_latest: dict[str, float] = {}

#: In the reports of a rank that has a loader of ``data=``: seconds for which it has waited since its last report.
DATA_WAIT = "data_wait"

_data_wait: float | None = None

_MOST_NAMES = 1000  # names whose latest values :func:`latest` returns


def begin(path: Path, world_size: int, attempt: int) -> None:
    """Begin to write reports, since this process is now a rank."""
    global _writer, _data_wait
    _writer, _data_wait = Writer(path, room(world_size), attempt), None
    with suppress(OSError):
        _writer._file.descriptor()  # created now, so that the agent need not keep looking for it


def add(values: dict[str, Any], step: Any, total_steps: Any, *, tracked: bool = False) -> None:
    """Check a report, and write it if this process is a rank. ConfigurationError if a name or a value is wrong.

    ``tracked``: this process has logged the values to the run in MLflow as well.
    """
    for name, value in values.items():
        if not is_number(value) or type(name) is not str:
            values[_name(name)] = _number(name, value)
    if step is not None and not (type(step) is int and is_number(step)):
        step = _whole("step", step)
    if total_steps is not None and not (type(total_steps) is int and is_number(total_steps)):
        total_steps = _whole("total_steps", total_steps)
    global _data_wait
    if _data_wait is not None:
        values[DATA_WAIT], _data_wait = _data_wait, 0.0
    if len(_latest) < _MOST_NAMES or values.keys() <= _latest.keys():
        _latest.update(values)
    else:
        _latest.update({name: value for name, value in values.items() if name in _latest})
    if _writer is not None:
        _writer.add(values, step, total_steps, tracked=tracked)


def committed(step: int, path: str) -> None:
    """Tell the driver that a checkpoint has been committed, if this process is a rank."""
    if _writer is not None:
        _writer.committed(step, path)


def unsaved(step: int, why: str) -> None:
    """Tell the driver that a checkpoint could not be committed, if this process is a rank."""
    if _writer is not None:
        _writer.unsaved(step, why)


def resumed(step: int | None, path: str, saved: float | None = None, *, own: bool) -> None:
    """Log on rank 0 where training continues, and tell the driver if this process is a rank."""
    if _writer is None:
        notices.inform(str(Resumed(0, step, path, saved)))
    elif (record := _writer.resumed(step, path, saved, own=own)) is not None:
        notices.logger.info("%s", record)  # the driver shows it


def warn(text: str) -> None:
    """Warn the user on the driver, even if it shows no lines of this rank. Outside a run, rank 0 logs the text."""
    text = text.encode(errors="backslashreplace").decode()  # names of files need not be UTF-8
    sent = _writer is not None and _writer.warned(text)
    if not sent and (_writer is not None or os.environ.get("RANK", "0") == "0"):
        notices.logger.warning("%s", text)


def waited(seconds: float) -> None:
    """Count time for which training has waited for a batch: the next report of this rank has it."""
    global _data_wait
    if _writer is not None:
        _data_wait = (_data_wait or 0.0) + seconds


def spent(what: Literal["saving", "loading", "data"], seconds: float) -> None:
    """Tell the driver for how long this process has done something, if it is a rank."""
    if _writer is not None:
        _writer.spent(what, seconds)


@contextmanager
def spending(what: Literal["saving", "loading"]) -> Iterator[None]:
    """Tell the driver how long the ``with`` block takes, if this process is a rank."""
    began = time.monotonic()
    try:
        yield
    finally:
        spent(what, time.monotonic() - began)


def latest() -> dict[str, float]:
    """Return the latest value that this process has reported under each name."""
    return dict(_latest)


def finish() -> None:
    """Write the last report if it was left out to save space."""
    if _writer is not None:
        _writer.finish()


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigurationError(f"report(): names of values must be strings, not {name!r}")
    return name


def _number(name: str, value: Any) -> float:
    """Return a reported value as a number. The value may be a tensor or an array of one element."""
    number = as_number(value)
    if number is not None:
        with suppress(OverflowError):
            return number if is_number(number) else float(number)
    raise ConfigurationError(f"report(): {name} must be a number or a tensor of one element, not {_described(value)}")


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape is not None else repr(value)[:100]


def _whole(name: str, value: Any) -> int:
    number = as_whole(_number(name, value))
    if number is None:
        raise ConfigurationError(f"report(): {name} must be a whole number, not {value!r}")
    if not is_number(number):
        raise ConfigurationError(f"report(): {name} must be less than 2**63, not {value!r}")
    return number
