"""Collects what ranks report with ``runtime.report``: each report once, up to a limit, and for callbacks."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from distributor.metrics.ended import EndedAttempt
from distributor.metrics.goodput import Course, Goodput
from distributor.metrics.table import Metrics, Row, TrackedRow
from distributor.text import escapes
from distributor.text.wording import size
from distributor.values import reports
from distributor.values.messages import Offset
from distributor.values.outcome import REPORTS, Log
from distributor.values.reports import (
    LONGEST,
    Committed,
    Progress,
    Report,
    Resumed,
    Spent,
    TrackedReport,
    Unsaved,
    Warned,
)

_WINDOW = 30.0  # seconds over which steps per second are measured

_RECENT = 1000  # a rank's last reports from which steps per second are computed

_MOST_NAMES = 1000  # metrics of which the latest value is kept


@dataclass(frozen=True)
class NodeSample:
    """The load of a node at a moment."""

    node_rank: int
    time: float  # seconds since the epoch
    values: Mapping[str, float]


News = Row | Committed | EndedAttempt | NodeSample  # what callbacks receive

_MOST_NEW = 100_000  # items that wait for callbacks; of more, the oldest are dropped

_MOST_WARNINGS = 100  # different warnings of ranks that are shown

_SLACK = 2  # times a rank's own limit, since driver and rank count bytes differently


@dataclass
class _Kept:
    """The reports that the driver keeps of one rank in one attempt."""

    reports: list[Report] = field(default_factory=list)
    size: int = 0
    stage: int = 0
    made: int = 0
    total_steps: int | None = None
    stepped: Report | None = None  # the last one with a step

    def add(self, report: Report, length: int) -> None:
        """Keep a report of ``length`` bytes, and drop earlier ones that the rank's stage leaves out.

        To save space, a rank in stage ``n`` writes only the reports whose number is a multiple of ``2**n``.
        """
        self.made = max(self.made, report.number + 1)
        self.total_steps = report.total_steps if report.total_steps is not None else self.total_steps
        if report.step is not None and (self.stepped is None or report.number > self.stepped.number):
            self.stepped = report
        if report.stage > self.stage:
            before, self.stage = len(self.reports), report.stage
            self.reports = [each for each in self.reports if each.number & ((1 << self.stage) - 1) == 0]
            self.size = self.size * len(self.reports) // max(1, before)
        self.reports.append(report)
        self.size += length


@dataclass
class _Stream:
    """How many bytes of a rank's reports have arrived, and the last line while it is incomplete."""

    offset: int = 0
    begun: bytes = b""


class Reports:
    """Receives the ranks' reports in pieces. A piece may arrive again, for example after a connection broke."""

    def __init__(self, world_size: int, attempts: int) -> None:
        self._attempts = attempts  # reports of later ones are ignored
        self._room = _SLACK * reports.room(world_size)
        self._streams: dict[int, _Stream] = {}
        self._kept: dict[tuple[int, int], _Kept] = {}  # by attempt and rank
        self._attempt = 0  # the latest attempt in which a rank has reported
        self._newest: dict[str, tuple[int, float]] = {}  # rank and value by name, in the latest attempt
        self._new: deque[News] | None = None  # what the next call of new() returns; None before its first call
        self._told_behind = False  # whether the warning about slow callbacks was given
        self._ended: list[EndedAttempt] = []
        self._courses: dict[int, Course] = {}  # by attempt
        self.last_committed: Committed | None = None
        self.unsaved: Unsaved | None = None  # the last save, if it failed
        self.resumed: Resumed | None = None  # where the newest attempt that has loaded continues
        self._told = False  # whether the warning about dropped reports was given
        self._warned: set[Warned] = set()  # the warnings that ranks have sent
        self._lock = threading.Lock()

    def take(self, log: Log) -> list[str | Resumed]:
        """Take a piece of a rank's reports. Return what the user must read: warnings, and where training continues."""
        with self._lock:
            stream = self._streams.setdefault(log.rank, _Stream())
            data = log.data[max(0, stream.offset - log.offset) :]
            if not data:
                return []
            stream.offset = log.offset + len(log.data)
            *lines, begun = (stream.begun + data).split(b"\n")
            stream.begun = begun[: LONGEST + 1]
            texts = [text for line in lines for text in self._add(log.rank, line)]
            return [*texts, *self._too_many(log.rank), *self._too_slow()]

    def _add(self, rank: int, line: bytes) -> Sequence[str | Resumed]:
        """Take a line. Return what the user must read of it."""
        record = reports.parse(line) if len(line) <= LONGEST else None
        match record:
            case Committed():
                self._note_step(record.attempt, record.step, record.time)
                self._note_saved(record)
                self.last_committed, self.unsaved = record, None
                self._add_news(record)
            case Unsaved() if rank == 0:
                self.unsaved = record
            case Resumed() if rank == 0 and self._attempt_resumed <= record.attempt < self._attempts:
                self.resumed = record
                return [record]
            case Spent() if rank == 0:
                self._note_spent(record)
            case Warned():
                return self._new_warning(rank, record)
            case Report() if record.attempt < self._attempts:
                self._add_report(rank, record, len(line))
        return []

    @property
    def _attempt_resumed(self) -> int:
        return -1 if self.resumed is None else self.resumed.attempt

    def _add_report(self, rank: int, report: Report, length: int) -> None:
        if report.attempt > self._attempt:
            self._attempt = report.attempt
            self._newest.clear()
        self._note_step(report.attempt, report.step, report.time)
        if report.attempt == self._attempt:
            self._note_newest(rank, report)
        kept = self._kept.setdefault((report.attempt, rank), _Kept())
        if kept.size + length >= self._room and report.stage <= kept.stage:
            kept.made = max(kept.made, report.number + 1)
            return
        kept.add(report, length + 1)
        row = _row(rank, report)
        self._add_news(TrackedRow(*row) if isinstance(report, TrackedReport) else row)

    def fit(self, world_size: int) -> None:
        """Note how many ranks the job has: each rank computes from it how much it may report."""
        with self._lock:
            self._room = _SLACK * reports.room(world_size)

    def begin_again(self) -> None:
        """Prepare for the run's next job, whose ranks write new streams. Keep the reports of earlier jobs."""
        with self._lock:
            self._streams.clear()

    def expect_another(self) -> None:
        with self._lock:
            self._attempts += 1

    def end_attempt(self, number: int, reason: str | None, goodput: Goodput, executor: str | None = None) -> None:
        with self._lock:
            course = self._courses.get(number, Course())
            ended = EndedAttempt(number, goodput.total, reason, course.step, goodput, executor)
            self._ended.append(ended)
            self._add_news(ended)

    def reached(self, attempt: int, step: int) -> None:
        """Record a step that ranks have reached, even if they have not called ``report()`` for it."""
        with self._lock:
            self._note_step(attempt, step, time.time())

    def courses(self, number: int) -> list[Course]:
        """Return the progress of each attempt up to attempt ``number``."""
        return [self.course(each) for each in range(number + 1)]

    def course(self, number: int) -> Course:
        """Return the progress of an attempt, as far as its ranks have reported it."""
        with self._lock:
            return replace(self._courses.get(number, Course()))

    @property
    def ended(self) -> tuple[EndedAttempt, ...]:
        with self._lock:
            return tuple(self._ended)

    def add_sample(self, sample: NodeSample) -> None:
        with self._lock:
            self._add_news(sample)

    def _add_news(self, news: News) -> None:
        if self._new is not None:
            self._new.append(news)

    def _note_step(self, attempt: int, step: int | None, at: float) -> None:
        if step is not None and attempt < self._attempts:
            course, before = self._courses.setdefault(attempt, Course()), None
            if course.passed is None:  # otherwise, the attempt is already past their steps
                earlier = [each.step for number, each in self._courses.items() if number < attempt]
                before = max((each for each in earlier if each is not None), default=None)
            age = max(0.0, time.time() - at)  # known now: clocks may be set later
            course.note(step, time.monotonic() - age, before)

    def _note_saved(self, record: Committed) -> None:
        if record.attempt < self._attempts:
            course = self._courses[record.attempt]
            course.saved = max(record.step, course.saved or 0)

    def _note_spent(self, spent: Spent) -> None:
        if spent.attempt < self._attempts:
            course = self._courses.setdefault(spent.attempt, Course())
            setattr(course, spent.what, getattr(course, spent.what) + spent.seconds)

    def _note_newest(self, rank: int, report: Report) -> None:
        for name, value in report.values.items():
            known = self._newest.get(name)
            if rank <= known[0] if known is not None else len(self._newest) < _MOST_NAMES:
                self._newest[name] = (rank, value)

    def _new_warning(self, rank: int, warned: Warned) -> list[str]:
        if warned.attempt >= self._attempts or len(self._warned) >= _MOST_WARNINGS or warned in self._warned:
            return []
        self._warned.add(warned)
        return [f"rank {rank}: {escapes.plain(warned.text)}"]

    def _too_many(self, rank: int) -> Iterator[str]:
        kept = self._kept.get((self._attempt, rank))
        if self._told or kept is None or not kept.stage:
            return
        self._told = True
        yield (
            f"rank {rank} has reported more than {size(self._room // _SLACK)}: only every second report is kept, "
            "then every fourth, and so on; run.metrics.dropped counts the dropped reports. Report less often"
        )

    def _too_slow(self) -> Iterator[str]:
        if not self._told_behind and self._new is not None and len(self._new) == _MOST_NEW:
            self._told_behind = True
            yield (
                f"callbacks are slower than reports: only the last {_MOST_NEW:,} wait for them, and run.metrics has "
                "the others. Report less often, or let on_metrics return sooner"
            )

    def received(self, rank: int) -> int:
        """Return how many bytes of a rank's reports have arrived."""
        with self._lock:
            return self._streams[rank].offset if rank in self._streams else 0

    def offsets(self, ranks: Iterable[int]) -> tuple[Offset, ...]:
        with self._lock:
            return tuple((rank, REPORTS, self._streams[rank].offset) for rank in ranks if rank in self._streams)

    def new(self) -> tuple[News, ...]:
        """Return what is new for callbacks since the last call. The first call returns nothing, but begins it."""
        with self._lock:
            news, self._new = tuple(self._new or ()), deque(maxlen=_MOST_NEW)
            return news

    @property
    def metrics(self) -> Metrics:
        with self._lock:
            made = [(rank, list(kept.reports)) for (_, rank), kept in self._kept.items()]
            dropped = sum(kept.made - len(kept.reports) for kept in self._kept.values())
        rows = [
            (report.attempt, latest, rank, _row(rank, report))
            for rank, those in made
            for latest, report in zip(accumulate((each.time for each in those), max), those)
        ]  # a clock that is set back changes no rank's order
        return Metrics(tuple(row for *_, row in sorted(rows, key=lambda each: each[:3])), max(0, dropped))

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of each metric in the latest attempt: the lowest rank's, if several report it."""
        with self._lock:
            return {name: value for name, (_, value) in self._newest.items()}

    @property
    def progress(self) -> Progress | None:
        with self._lock:
            attempt = self._attempt
            for rank in sorted(rank for number, rank in self._kept if number == attempt):
                kept = self._kept[attempt, rank]
                if kept.stepped is not None:
                    made = sorted([*kept.reports[-_RECENT:], kept.stepped], key=lambda each: each.number)
                    return progress(made, kept.total_steps)
        return None


def _row(rank: int, report: Report) -> Row:
    return Row(report.attempt, report.step, report.time, rank, report.values)


def progress(made: Sequence[Report], total: int | None) -> Progress | None:
    """Return how far a rank has come, according to its last reports; ``None`` if no report has a step.

    >>> progress([Report(n, 0, 0, 100.0 + n / 2, n, None) for n in range(20)], 60)
    Progress(step=19, total=60, rate=2.0)
    """
    stepped = [(report.time, report.step) for report in made if report.step is not None]
    if not stepped:
        return None
    now, step = stepped[-1]
    before, first = stepped[min(len(stepped) - 1, bisect_left(stepped, now - _WINDOW, key=lambda each: each[0]))]
    rate = (step - first) / (now - before) if step > first and now > before else None
    return Progress(step, total, rate)
