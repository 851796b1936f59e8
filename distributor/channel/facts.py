"""The *facts* of a run's tasks on the driver: each task's address, port, GPUs, CPUs and more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from distributor.channel import frames
from distributor.values.messages import Gather, Stop, TaskFacts

_ATTEMPTS_PER_TASK = 8  # that begin the wait for further tasks again

_CONNECTIONS_PER_TASK = 8  # some may belong to earlier tasks, or be broken but not yet closed

#: Returns the frames of the answer to each task, by partition; ``None`` if the tasks must end.
Answers = Callable[[Sequence[TaskFacts]], Sequence[Sequence[bytes]] | None]


class Facts:
    """The facts of connected tasks, and the answer that tasks get once the facts are complete.

    Spark may start all tasks again while earlier ones are still connected. Only the newest *wave* counts: the tasks
    that Spark started together with the one of the highest ``taskAttemptId()``. After a start on the same executors,
    earlier tasks are in the wave too; but tasks started together have consecutive IDs, so the facts are complete only
    if the IDs are. If a version of Spark gave other IDs, tasks would always use ``allGather``.
    """

    def __init__(self, tasks: int, answers: Answers) -> None:
        self.tasks = tasks
        #: An agent has connected. A task that sends facts now was started again, or has missed the answer.
        self.over = False
        self.fallback: asyncio.TimerHandle | None = None  # ends the wait for missing tasks
        self.gather_since: float | None = None  # since when all use Spark's allGather, as some cannot reach the driver
        self.here: dict[asyncio.StreamWriter, TaskFacts] = {}
        self._waves: dict[str, dict[asyncio.StreamWriter, TaskFacts]] = {}  # the same by TaskFacts.stage_attempt
        self._attempts: set[int] = set()  # of all tasks that have been here
        self._newest: TaskFacts | None = None  # of the highest attempt in `here`; None: look for it
        self._complete: dict[int, TaskFacts] = {}
        self._unanswered: dict[asyncio.StreamWriter, None] = {}
        self.begun = False  # the facts were complete and accepted once, so tasks may have them
        self._answers = answers
        self._answered: Sequence[Sequence[bytes]] = ()  # by partition
        self._refused = False

    def knows(self, facts: TaskFacts) -> bool:
        """Return whether complete facts include these, as after a broken connection; a restarted task's differ."""
        return self._complete.get(facts.partition) == facts

    def take(self, writer: asyncio.StreamWriter, facts: TaskFacts) -> bool:
        """Record a connected task's facts, and return whether the task is new; ValueError for too many connections."""
        if len(self.here) >= _CONNECTIONS_PER_TASK * max(1, self.tasks):
            raise ValueError(
                "a task sends its facts (address, GPUs and more), but the maximum number of connections is already open"
            )
        is_new = facts.attempt not in self._attempts and len(self._attempts) < _ATTEMPTS_PER_TASK * max(1, self.tasks)
        if is_new:
            self._attempts.add(facts.attempt)
        self.here[writer] = self._waves.setdefault(facts.stage_attempt, {})[writer] = facts
        self._unanswered[writer] = None
        if self._newest is not None and facts.attempt > self._newest.attempt:
            self._newest = facts
        current = self._current()
        if writer not in current:
            return is_new
        if self._complete and self._complete[facts.partition] != facts:
            self._complete = {}
        if self._complete or len(current) < self.tasks:
            return is_new
        newest = {entry.partition: entry for entry in current.values()}
        attempts = [entry.attempt for entry in newest.values()]
        if len(newest) == self.tasks == max(attempts) - min(attempts) + 1:
            answers = self._answers([newest[partition] for partition in sorted(newest)])
            self._refused = answers is None
            if answers is not None:
                self._complete, self._answered = newest, answers
                self.begun = True
        return is_new

    def _current(self) -> dict[asyncio.StreamWriter, TaskFacts]:
        """Return the facts of the newest wave."""
        if self._newest is None:
            self._newest = max(self.here.values(), key=lambda facts: facts.attempt, default=None)
        return {} if self._newest is None else self._waves[self._newest.stage_attempt]

    @property
    def told(self) -> int:
        """The number of connected tasks of the newest wave; any thread may ask, and 0 if all facts have been there."""
        newest = self._newest
        return 0 if newest is None else min(len(self._waves.get(newest.stage_attempt, ())), self.tasks)

    def forget(self, writer: asyncio.StreamWriter) -> None:
        facts = self.here.pop(writer, None)
        self._unanswered.pop(writer, None)
        if facts is None:
            return
        wave = self._waves[facts.stage_attempt]
        del wave[writer]
        if not wave:
            del self._waves[facts.stage_attempt]
        if facts is self._newest:
            self._newest = None
            if not self.settled:
                self._current()

    def start_again(self) -> bool:
        """Return whether the tasks were refused, and forget it. The driver may then submit again."""
        refused, self._refused = self._refused, False
        return refused

    def waiting(self) -> list[asyncio.StreamWriter]:
        """Return the newest wave's connections without an answer, and mark them as answered."""
        current = self._current()
        waiting = [writer for writer in self._unanswered if writer in current]
        for writer in waiting:
            del self._unanswered[writer]
        return waiting

    @property
    def settled(self) -> bool:
        """Whether all facts have come, and were accepted or refused."""
        return bool(self._complete) or self._refused

    @property
    def given_up(self) -> bool:
        """Whether all use Spark's ``allGather``."""
        return self.gather_since is not None

    def answer(self, writer: asyncio.StreamWriter) -> Sequence[bytes]:
        """Return the frames of the answer to a connected task, once :attr:`settled` or :attr:`given_up`."""
        if self.given_up:
            return [frames.pack(Gather())]
        if self._refused:
            return [frames.pack(Stop("the driver has refused Spark's placement of the ranks"))]
        return self._answered[self.here[writer].partition]
