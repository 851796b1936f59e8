"""The *facts* of a run's tasks on the driver: each task's address, port, GPUs, CPUs and more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distributor.values.messages import AllFacts, Gather, Message, Stop, TaskFacts

_CONNECTIONS_PER_TASK = 8  # some may belong to earlier tasks, or be broken but not yet closed


class Facts:
    """The facts of connected tasks, and the answer that tasks get once the facts are complete.

    Spark may start all tasks again while earlier ones are still connected. Only the newest *wave* counts: the tasks
    that Spark started together with the one of the highest ``taskAttemptId()``. After a start on the same executors,
    earlier tasks are in the wave too; but tasks started together have consecutive IDs, so the facts are complete only
    if the IDs are. If a version of Spark gave other IDs, tasks would always use ``allGather``.
    """

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        #: An agent has connected. A task that sends facts now was started again, or has missed the answer.
        self.over = False
        self.fallback: asyncio.TimerHandle | None = None  # ends the wait for missing tasks
        self.given_up = False  # some tasks cannot reach the driver: all use Spark's allGather
        self.here: dict[asyncio.StreamWriter, TaskFacts] = {}
        self._complete: dict[int, TaskFacts] = {}
        self._answered: set[asyncio.StreamWriter] = set()
        self.begun = False  # the facts were complete and accepted once, so tasks may have them
        #: Decides by all facts whether the run may begin on these executors.
        self.accept: Callable[[list[dict[str, Any]]], bool] = lambda facts: True
        self._refused = False

    def knows(self, told: TaskFacts) -> bool:
        """Return whether complete facts include these, as after a broken connection; a restarted task's differ."""
        return self._complete.get(told.partition) == told

    def take(self, writer: asyncio.StreamWriter, told: TaskFacts) -> None:
        """Record a connected task's facts; ValueError if too many connections are open."""
        if len(self.here) >= _CONNECTIONS_PER_TASK * max(1, self.tasks):
            raise ValueError(
                "a task sends its facts (address, GPUs and more), but the maximum number of connections is already open"
            )
        self.here[writer] = told
        current = self._current()
        if writer not in current:
            return
        if self._complete and self._complete[told.partition] != told:
            self._complete = {}
        newest = {entry.partition: entry for entry in current.values()}
        attempts = [entry.attempt for entry in newest.values()]
        if not self._complete and len(newest) == self.tasks == max(attempts) - min(attempts) + 1:
            self._refused = not self.accept([entry.facts for entry in newest.values()])
            if not self._refused:
                self._complete = newest
                self.begun = True

    def _current(self) -> dict[asyncio.StreamWriter, TaskFacts]:
        """Return the facts of the newest wave."""
        newest = max(self.here.values(), key=lambda told: told.attempt, default=None)
        return {
            writer: told
            for writer, told in self.here.items()
            if newest is not None and told.stage_attempt == newest.stage_attempt
        }

    @property
    def told(self) -> int:
        """The number of connected tasks of the newest wave."""
        return min(len(self._current()), self.tasks)

    def forget(self, writer: asyncio.StreamWriter) -> None:
        self.here.pop(writer, None)
        self._answered.discard(writer)

    def give_up(self) -> None:
        self.given_up = True

    def start_again(self) -> bool:
        """Return whether :attr:`accept` has refused the tasks, and forget it. The driver may then submit again."""
        refused, self._refused = self._refused, False
        return refused

    def waiting(self) -> list[asyncio.StreamWriter]:
        """Return the newest wave's connections without an answer, and mark them as answered."""
        waiting = [writer for writer in self._current() if writer not in self._answered]
        self._answered.update(waiting)
        return waiting

    @property
    def settled(self) -> bool:
        """Whether all facts have come, and were accepted or refused."""
        return bool(self._complete) or self._refused

    def answer(self) -> Message | None:
        """Return the answer for all tasks; ``None`` while facts are missing."""
        if self.given_up:
            return Gather()
        if self._refused:
            return Stop("the driver has refused Spark's placement of the ranks")
        if not self._complete:
            return None
        return AllFacts(tuple(told.facts for told in self._complete.values()))
