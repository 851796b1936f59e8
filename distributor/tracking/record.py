"""What is remembered of a run after its driver has ended: one small file, as JSON."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from distributor.machine import processes
from distributor.metrics.ended import EndedAttempt
from distributor.metrics.goodput import Goodput
from distributor.text.tables import table
from distributor.text.wording import count, duration, printable, without_password
from distributor.values.codec import Between
from distributor.values.reports import is_number

#: How much of a run a file keeps.
MOST_NAMES, MOST_ATTEMPTS, LONGEST = 100, 50, 500

LOST = "lost"

#: Seconds since the epoch, which can be shown as a date.
Time = Annotated[float, Between(0.0, 1e11)]


@dataclass(frozen=True)
class Driver:
    """The process that started a run."""

    host: str
    scope: str  # in which the pid and the start time mean one process
    pid: Annotated[int, Between(0, 2**31)]
    started: str

    @classmethod
    def here(cls) -> Driver:
        """Return this process."""
        pid = os.getpid()
        return cls(socket.gethostname(), processes.pid_scope(), pid, processes.start_time(pid) or "")

    def is_gone(self) -> bool:
        """Return whether the process has surely ended, which only its own host can know."""
        if self.host != socket.gethostname() or not self.scope:
            return False
        return self.scope != processes.pid_scope() or processes.has_ended(self.pid, self.started)


@dataclass(frozen=True)
class RunRecord:
    """A run of this or an earlier driver, as a file remembers it.

    Attributes:
        id: the identifier of the run.
        name: the user's name for it, if it has one.
        title: the function, script or module that it has run.
        driver: the process that started it: ``host``, ``pid``.
        said: its status when the file was written. ``status`` also says whether its driver is gone.
        submitted, ended: when it was submitted and ended, in seconds since the epoch; ``ended`` may be ``None``.
        num_processes: the number of ranks.
        step, total_steps: how far it has come, if it has reported steps.
        latest_metrics: the newest value of each metric.
        arguments, versions: as those of a :class:`Run`.
        attempts: the first and the last of its attempts that have ended.
        goodput: where its time went.
        placement: which ranks ran where, in words.
        checkpoint: the folder or URL of its last checkpoint.
        log_folder: the folder with its output.
        study, trial: the name of the study and the number of the trial that it is.
        error: why it failed, in one line.
    """

    id: str
    name: str | None
    title: str
    driver: Driver
    said: str
    submitted: Time
    ended: Time | None = None
    num_processes: int = 1
    step: int | None = None
    total_steps: int | None = None
    latest_metrics: Mapping[str, float | str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    attempts: tuple[EndedAttempt, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)
    placement: str | None = None
    checkpoint: str | None = None
    log_folder: str | None = None
    study: str | None = None
    trial: int | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """What a table calls the run: its name, its study and trial, or what it has run."""
        return (self.name or self.title) if self.trial is None else f"{self.study}/{self.trial}"

    @property
    def status(self) -> str:
        """``"succeeded"``, ``"failed"``, ``"cancelled"``, ``"lost"`` if its driver is gone, or what it is doing."""
        return LOST if self.ended is None and self.driver.is_gone() else self.said

    @property
    def seconds(self) -> float:
        """How long it has taken so far, by this machine's clock; without its end, until the last known one."""
        if self.ended is None and self.status == LOST:
            return self.goodput.total
        return max(0.0, (self.ended or time.time()) - self.submitted)

    def __str__(self) -> str:
        """Return all that is known of the run, in lines."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.submitted))
        lines = [
            f"run {self.id if self.name is None else f'{self.name} ({self.id})'}: {self.status}",
            f"{self.title} with {count(self.num_processes, 'process')}, {when}, {duration(self.seconds)}, "
            f"from process {self.driver.pid} on {self.driver.host}",
        ]
        facts = {
            "trial": None if self.trial is None else f"{self.trial} of {self.study}",
            "arguments": _pairs(self.arguments),
            "step": None if self.step is None else f"{self.step}{_of(self.total_steps)}",
            "metrics": _pairs(self.latest_metrics),
            "placement": self.placement,
            "checkpoint": self.checkpoint,
            "output": self.log_folder,
            "versions": _pairs(self.versions),
            "time": str(self.goodput) if self.goodput.total else None,
            "error": self.error,
        }
        lines += [f"  {name}: {value}" for name, value in facts.items() if value]
        return "\n".join([*lines, *(f"  {attempt}" for attempt in self.attempts)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def record_of(run: Any, driver: Driver) -> RunRecord:
    """Return what is to be remembered of a run at this moment."""
    progress, placement, checkpoint, error = run.progress, run.placement, run.last_checkpoint, run.error
    attempts, snapshot, trial = run.attempts, run.snapshot(), run.trial
    kept = attempts if len(attempts) <= MOST_ATTEMPTS else (attempts[0], *attempts[1 - MOST_ATTEMPTS :])
    metrics = {name: value if abs(value) < float("inf") else str(value) for name, value in run.latest_metrics.items()}
    return RunRecord(
        id=run.id,
        name=run.name,
        title=printable(snapshot.title[-LONGEST:]),
        driver=driver,
        said=run.status.value,
        submitted=run.submitted,
        ended=run.ended,
        num_processes=run.num_processes,
        step=None if progress is None else progress.step,
        total_steps=None if progress is None else progress.total,
        latest_metrics=_first(metrics),
        arguments=_first(
            {name: value if _is_plain(value) else str(value)[:LONGEST] for name, value in run.arguments.items()}
        ),
        versions=run.versions,
        attempts=tuple(_short(attempt) for attempt in kept),
        goodput=run.goodput,
        placement=None if placement is None else str(placement)[:LONGEST],
        checkpoint=None if checkpoint is None else printable(without_password(checkpoint.path[:4096])),
        log_folder=None if run.log_folder is None else printable(str(run.log_folder)),
        study=None if trial is None else trial.study,
        trial=None if trial is None else trial.number,
        error=None if error is None else _line(str(error)),
    )


def show(records: Sequence[Any]) -> str:
    """Return runs and records as a table, in their order."""
    rows = []
    for each in records:
        record = each if isinstance(each, RunRecord) else record_of(each, Driver.here())
        when = time.strftime("%m-%d %H:%M", time.localtime(record.submitted))
        step = "" if record.step is None else f"{record.step}{_of(record.total_steps)}"
        metrics = _pairs(dict(list(record.latest_metrics.items())[:3]))
        rows.append([record.label, record.id, record.status, when, duration(record.seconds), step, metrics])
    return table(["name", "id", "status", "when", "time", "step", "metrics"], rows)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool) or (is_number(value) and abs(value) < float("inf"))


def _short(attempt: EndedAttempt) -> EndedAttempt:
    reason = None if attempt.reason is None else _line(attempt.reason)
    return EndedAttempt(attempt.number, attempt.seconds, reason, attempt.step, attempt.goodput, attempt.executor)


def _line(text: str) -> str:
    return printable(without_password(text.partition("\n")[0]))[:LONGEST]


def _first(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name[:LONGEST]: value for name, value in list(values.items())[:MOST_NAMES]}


def _of(total: int | None) -> str:
    return "" if total is None else f" of {total}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in values.items()
    )
