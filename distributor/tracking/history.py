"""The files that remember runs, one for each, in a folder of the user's."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributor.run.handle import Run, active_runs
from distributor.text import notices
from distributor.tracking.record import Driver, RunRecord, record_of, show
from distributor.values import codec

MOST = 500  # files that are kept

_LARGEST = 4 << 20  # bytes of a file that is read; in JSON, a character may take 12

_STALE = 3600.0  # seconds after which a file counts as left by a driver that was killed while it wrote

_warned: set[str] = set()  # folders that this process has said it cannot write to


def default_folder() -> Path:
    """Return where runs are remembered: ``DISTRIBUTOR_RUNS``, by default ``distributor/runs`` in the user's caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("DISTRIBUTOR_RUNS") or os.path.join(caches, "distributor", "runs")).absolute()


class Runs(Sequence[Run | RunRecord]):
    """Runs: the handles of this process's active ones, the oldest first, then what is remembered, the newest first.

    ``print`` shows them as a table, a slice of them too.

    Attributes:
        active: the handles of the active runs alone.
    """

    def __init__(self, runs: Iterable[Run | RunRecord]) -> None:
        self._all = list(runs)
        self.active = [run for run in self._all if not isinstance(run, RunRecord)]

    def __getitem__(self, index: Any) -> Any:
        return Runs(self._all[index]) if isinstance(index, slice) else self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return show(self._all)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(repr(self))}</pre>"


def runs() -> Runs:
    """Return the runs of this process that have not ended, as handles, and then earlier ones of this user.

    A notebook's cell that is run again finds a run here whose handle was lost. Earlier runs are remembered in the
    folder that the environment variable ``DISTRIBUTOR_RUNS`` names (default: ``~/.cache/distributor/runs``).

    Example:
        >>> distributor.runs()  # doctest: +SKIP
        name              id     status         when        time     step      metrics
        digits  3f2a51c09b7e    running  11-02 10:31        12 s  8 of 40    loss 0.25
        digits  91c06d1f22aa  succeeded  11-02 10:02  1 min 23 s       40  loss 0.0625
        >>> distributor.runs().active[0].cancel()  # doctest: +SKIP
    """
    active = active_runs()
    known = {run.id for run in active}
    remembered = History(default_folder()).read()
    return Runs([*active, *(record for record in remembered if record.id not in known)])


class History:
    """The folder with a file for each run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> list[RunRecord]:
        """Return what is remembered, the newest first. What is no record, or cannot be read, is left out."""
        records = []
        with suppress(OSError):
            for path in self.folder.glob("*.json"):
                with suppress(OSError, ValueError, TypeError):
                    if path.is_file() and path.stat().st_size <= _LARGEST:  # reading a pipe would not end
                        records.append(codec.read(RunRecord, path.read_bytes()))
        return sorted(records, key=lambda record: record.submitted, reverse=True)

    def write(self, record: RunRecord) -> None:
        """Write a run's file in one step: another process, or one after a kill, sees the old or the new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(".new", f".{record.id}-", self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(codec.pack(record))
            os.replace(path, self.folder / f"{record.id}.json")
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise

    def prune(self) -> None:
        """Remove the oldest files beyond :data:`MOST`, and what killed drivers have left."""
        files: list[tuple[float, str]] = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # another driver has just removed it
                changed = entry.stat().st_mtime
                if entry.name.endswith(".new") and time.time() - changed > _STALE:
                    os.unlink(entry.path)
                elif entry.name.endswith(".json"):
                    files.append((changed, entry.path))
        for _, path in sorted(files)[: max(0, len(files) - MOST)]:
            with suppress(OSError):
                os.unlink(path)


class Recorder:
    """The callback of every run that remembers it. A folder that cannot be written costs one warning."""

    def __init__(self) -> None:
        self._history = History(default_folder())
        self._driver = Driver.here()

    def on_start(self, run: Run) -> None:
        self._write(run)
        with suppress(OSError):
            self._history.prune()

    def on_metrics(self, run: Run, rows: Any) -> None:
        self._write(run)

    def on_checkpoint(self, run: Run, checkpoint: Any) -> None:
        self._write(run)

    def on_attempt_end(self, run: Run, attempt: Any) -> None:
        self._write(run)

    def on_end(self, run: Run) -> None:
        self._write(run)

    def _write(self, run: Run) -> None:
        try:
            self._history.write(record_of(run, self._driver))
        except OSError as error:
            folder = str(self._history.folder)
            if folder not in _warned:
                _warned.add(folder)
                notices.logger.warning(
                    "runs are not remembered, since %s cannot be written: %s (DISTRIBUTOR_RUNS names another folder)",
                    folder,
                    error.strerror or error,
                )
