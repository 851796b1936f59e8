"""What is to be sent to a tracking server, on the driver's disk until it has been sent: a file for each run."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributor.text import notices
from distributor.text.wording import size
from distributor.values import codec

BOUND = 64 << 20  # unsent bytes of a run, above which metrics are thinned

_CHUNK = 256 << 10  # bytes that are sent together

_LARGE = 1 << 20  # bytes that have been sent, above which a file begins again with what is unsent


@dataclass(frozen=True)
class RunBegun:
    """A run begins, or goes on: the first line of each file."""

    key: str  # which run of the server it is
    place: str | None  # folder or URL where the key of a training with a name is kept, in place of `key`
    name: str
    time: float  # seconds since the epoch
    folder: str  # the driver's current one
    title: str
    study: str | None = None  # the name of the parent
    study_key: str | None = None


@dataclass(frozen=True)
class Params:
    """Arguments by name."""

    params: Mapping[str, str]


@dataclass(frozen=True)
class Tags:
    """Facts by name."""

    tags: Mapping[str, str]


@dataclass(frozen=True)
class Values:
    """Metrics of one report."""

    step: int | None
    at: float  # seconds since the epoch
    values: Mapping[str, float | str]  # a text is nan, inf or -inf

    @classmethod
    def of(cls, step: int | None, at: float, values: Mapping[str, float]) -> Values:
        """Return what was reported in a form that can be kept."""
        return cls(
            step, at, {name: value if abs(value) < float("inf") else str(value) for name, value in values.items()}
        )


@dataclass(frozen=True)
class LogFolder:
    """A folder whose files are to be uploaded."""

    files: str


@dataclass(frozen=True)
class RunEnded:
    """The run has ended, with a status of MLflow's."""

    status: str
    ended: float


Entry = RunBegun | Params | Tags | Values | LogFolder | RunEnded


@dataclass
class Spool:
    """One run's file, which belongs to the process that keeps it locked."""

    path: Path
    sent: int = 0  # bytes
    begin: bytes = b""
    _reports: int = 0
    _thinned: bool = False
    _torn: bool = False  # the last line is not complete
    _full: bool = False  # said
    _end: RunEnded | None = None  # of which a full disk has kept no line
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _mode: str = "a+b"

    def __post_init__(self) -> None:
        self._file: Any = _open(self.path, self._mode)

    @classmethod
    def create(cls, folder: Path, begin: RunBegun) -> Spool:
        """Make a file for a run."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{secrets.token_hex(8)}.spool"
        spool = cls(path.with_suffix(".new"))  # it gets its name once it is locked and has its first line
        fcntl.flock(spool._file, fcntl.LOCK_EX)
        spool.begin = codec.pack(begin) + b"\n"
        spool._file.write(spool.begin)
        spool.path = spool.path.rename(path)
        return spool

    @classmethod
    def left_in(cls, folder: Path) -> list[Spool]:
        """Take the files of drivers that have ended, or given up, the oldest first."""
        taken = [spool for path in folder.glob("*.spool") if (spool := cls._take(path)) is not None]
        return sorted(taken, key=lambda spool: spool.changed)

    @classmethod
    def _take(cls, path: Path) -> Spool | None:
        """Return a file, locked; ``None`` if another driver has it, or it cannot be read."""
        with suppress(OSError):  # its driver has just removed it
            spool = cls(path, _mode="r+b")
            with suppress(OSError):
                fcntl.flock(spool._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(spool._file.fileno()), path.stat()) and spool._restore():
                    return spool
            spool.release()
        return None

    def _restore(self) -> bool:
        """Return whether the file can be read; a crash of the machine may have emptied it. If not, put it aside."""
        self.begin = self._file.readline()
        try:
            codec.read(RunBegun, self.begin)
        except (ValueError, TypeError):
            aside = self.path.rename(self.path.with_suffix(".unreadable"))
            notices.logger.warning("MLflow: %s, which an earlier driver has left, cannot be read", aside)
            return False
        with suppress(OSError, ValueError):
            self.sent = int(self._acknowledged.read_text())
        if self.sent > self.size:
            self.sent = 0
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the file has the end of its run."""
        last = os.pread(self._file.fileno(), _CHUNK, max(0, self.size - _CHUNK)).splitlines()[-1]
        try:
            return isinstance(codec.read(Entry, last), RunEnded)  # type: ignore[arg-type]
        except ValueError:
            return False

    @property
    def _acknowledged(self) -> Path:
        return self.path.with_suffix(".sent")

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    @property
    def changed(self) -> float:
        """When the file was last written, in seconds since the epoch."""
        return os.fstat(self._file.fileno()).st_mtime

    def append(self, entry: Entry) -> None:
        """Add an entry; above the bound of unsent bytes, only some of the metrics. A full disk costs only the entry."""
        with self._lock:
            unsent = self.size - self.sent
            if isinstance(entry, Values):
                self._reports += 1
                if unsent > BOUND and self._reports % 2 ** (1 + 8 * (unsent - BOUND) // BOUND):
                    self._tell_thinned()
                    return
            line = codec.pack(entry) + b"\n"
            data = b"\n" + line if self._torn else line
            try:
                self._torn = lost = self._file.write(data) < len(data)
            except OSError:
                lost = True
            if lost:
                self._end = entry if isinstance(entry, RunEnded) else None
                self._tell_full()

    def _tell_full(self) -> None:
        if not self._full:
            self._full = True
            notices.logger.warning("MLflow: reports are lost, since %s cannot be written: is the disk full?", self.path)

    def _tell_thinned(self) -> None:
        if not self._thinned:
            self._thinned = True
            notices.logger.warning(
                "more than %s wait in %s to be sent: from now on, only some of the metrics are kept there",
                size(BOUND),
                self.path,
            )

    def read(self) -> tuple[list[Entry], int]:
        """Return the next entries to send, and where they end. The end of the run comes by itself.

        What comes with it would be sent again if the server did not take it.
        """
        entries: list[Entry] = []
        end = self.sent
        while not entries and (lines := self._lines(end)):
            for line in lines:
                with suppress(ValueError):  # a line that a full disk has cut
                    entry: Entry = codec.read(Entry, line)  # type: ignore[arg-type]
                    if entries and isinstance(entry, RunEnded):
                        break
                    entries.append(entry)
                end += len(line)
        if not entries and self._end is not None:
            entries.append(self._end)
        return entries, end

    def _lines(self, begin: int) -> list[bytes]:
        """Return some lines that are complete, at least one if there is one."""
        length = _CHUNK
        while b"\n" not in (data := os.pread(self._file.fileno(), length, begin)) and len(data) == length:
            length *= 2  # the line is longer
        return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)

    def acknowledge(self, end: int) -> None:
        """Note that all entries before ``end`` have been sent."""
        with self._lock, suppress(OSError):  # on a full disk, the next driver may send some once more
            self.sent = end
            if end > _LARGE and self.size - end < _CHUNK:
                self._begin_again()
            self._acknowledged.write_text(str(self.sent))

    def _begin_again(self) -> None:
        """Free the space of what has been sent."""
        path, rest = self.path.with_suffix(".new"), os.pread(self._file.fileno(), self.size - self.sent, self.sent)
        new = _open(path, "w+b")
        fcntl.flock(new, fcntl.LOCK_EX)
        if new.write(self.begin + rest) == len(self.begin) + len(rest):
            os.replace(path, self.path)
            self._file, new, self.sent = new, self._file, len(self.begin)
        new.close()

    def release(self) -> None:
        """Leave the file to another process."""
        self._file.close()

    def remove(self) -> None:
        for path in (self.path, self._acknowledged):
            with suppress(OSError):
                path.unlink()
        self.release()


def _open(path: Path, mode: str) -> Any:
    """Open a file that nobody else may read: the URL of a place may have a password."""
    return open(path, mode, buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))
