"""The callback for TensorBoard: writes what a run reports to event files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

from distributor.errors import ConfigurationError
from distributor.machine.storage import is_url
from distributor.metrics.table import Row
from distributor.run.handle import Run
from distributor.tracking.lowest import LowestRank

_MOST_HELD = 20  # rows without a step that wait for the first one with a step


class TensorBoard:
    """A callback that writes metrics for TensorBoard, on the driver.

    Each run has a subfolder, named by the run's name or else its id, and a trial one below its study's. A run that
    starts its ranks again, or continues an earlier run of its name, goes on with the line: what had been written from
    its first step on is replaced (``purge_step``). Each metric has the values of the lowest rank that reports it.

    Args:
        log_dir: a folder on the driver.

    Raises:
        ConfigurationError: tensorboard is not installed, or ``log_dir`` is a URL.

    Example:
        >>> Distributor(4, callbacks=[TensorBoard("logs")]).run(train)  # doctest: +SKIP
        ... # tensorboard --logdir logs
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigurationError(
                "TensorBoard needs tensorboard, which is not installed: pip install 'distributor[tensorboard]'"
            )
        if is_url(os.fspath(log_dir)):
            raise ConfigurationError(
                f"TensorBoard: log_dir must be a folder on the driver, not the URL {log_dir!r}: pass one, such as a "
                "mounted bucket"
            )
        self._log_dir = os.path.abspath(log_dir)
        self._writers: dict[str, _Writer] = {}  # by the id of the run

    def __repr__(self) -> str:
        return f"TensorBoard({self._log_dir!r})"

    def on_metrics(self, run: Run, rows: Sequence[Row]) -> None:
        self._writers.setdefault(run.id, _Writer(self.folder(run), run.arguments)).write(rows)

    def on_end(self, run: Run) -> None:
        if (writer := self._writers.pop(run.id, None)) is not None:
            writer.close()

    def folder(self, run: Run) -> str:
        """Return the folder of a run's files."""
        names = [run.name or run.id] if run.trial is None else [run.trial.study, str(run.trial.number)]
        safe = [quote(name, safe="+,=@ ") for name in names]
        return os.path.join(self._log_dir, *(f"%2E{name[1:]}" if name.startswith(".") else name for name in safe))


@dataclass
class _Writer:
    """Writes the files of one run: one for each attempt that reports."""

    folder: str
    arguments: Any
    lowest: LowestRank = field(default_factory=LowestRank)
    attempt: int = -1
    step: int = 0  # the last one
    file: Any = None
    held: list[Row] = field(default_factory=list)  # those before the first step of an attempt that goes on

    def write(self, rows: Sequence[Row], *, last: bool = False) -> None:
        for row in self.lowest.choose(rows, last=last):
            if self._waits_for_step(row):
                self.held.append(row)
            else:
                self._add(row)
        if self.held and (last or len(self.held) > _MOST_HELD):
            self._begin(self.held[0].attempt, None)
            self._add_held()
        if self.file is not None:
            self.file.flush()

    def _waits_for_step(self, row: Row) -> bool:
        return row.attempt > self.attempt and row.step is None and (bool(self.held) or self._goes_on)

    @property
    def _goes_on(self) -> bool:
        return os.path.isdir(self.folder) and bool(os.listdir(self.folder))

    def _add(self, row: Row) -> None:
        self.step = self.step if row.step is None else row.step
        if row.attempt > self.attempt:
            self._begin(row.attempt, row.step)
            self._add_held()
        for name, value in row.values.items():
            self.file.add_scalar(name, value, self.step, walltime=row.time)

    def _add_held(self) -> None:
        held, self.held = self.held, []
        for row in held:
            self._add(row)

    def _begin(self, attempt: int, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._close()
        again = self._goes_on
        self.attempt = attempt
        self.file = SummaryWriter(self.folder, purge_step=step if again else None)
        if not again:
            self.file.add_text("arguments", "\n".join(f"    {name}: {value}" for name, value in self.arguments.items()))

    def close(self) -> None:
        self.write((), last=True)
        self._close()

    def _close(self) -> None:
        if self.file is not None:
            self.file.close()
