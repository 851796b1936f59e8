"""Gather, on the driver, the facts of a run's tasks: the address, port, GPUs and CPUs of each task, and more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distributor.values.messages import AllFacts, Gather, Message, Stop, TaskFacts

#: Maximum number of connections per task. Some may belong to earlier tasks, or be broken but not yet closed.
_CONNECTIONS_PER_TASK = 8


class Facts:
    """The facts (address, GPUs and more) of connected tasks, and the answer that tasks get once all facts are known.

    Spark may start all tasks again while some of the previous ones are still connected. Only the tasks of the newest
    *wave* count: those that Spark started together with the task that has the highest ``taskAttemptId()``. (If Spark
    starts tasks again on the same executors, the earlier tasks are in the same wave.) Tasks that Spark starts together
    get consecutive IDs, so the driver considers the facts complete only if the IDs of all tasks are consecutive. If a
    version of Spark gives IDs that are not consecutive, the facts are never complete. All tasks then exchange their
    facts through Spark's ``allGather``, not through the driver.

    Args:
        tasks: number of tasks of the run.
    """

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        #: Whether the exchange of facts is over, because an agent has connected. If a task sends its facts later, Spark
        #: has started the task again, or the task has missed the answer.
        self.over = False
        #: The timer after which the driver no longer waits for missing tasks.
        self.fallback: asyncio.TimerHandle | None = None
        #: Whether the driver has given up waiting for all facts, because some tasks cannot reach it.
        self.given_up = False
        #: The facts (address, GPUs and more) that came over each open connection.
        self.here: dict[asyncio.StreamWriter, TaskFacts] = {}
        self._complete: dict[int, TaskFacts] = {}
        self._answered: set[asyncio.StreamWriter] = set()
        #: Whether the facts of all tasks were complete and accepted at some time, so that tasks may have got them.
        self.begun = False
        #: A function that gets the facts of all tasks, and decides whether the run may begin with the tasks on these
        #: executors.
        self.accept: Callable[[list[dict[str, Any]]], bool] = lambda facts: True
        self._refused = False

    def knows(self, told: TaskFacts) -> bool:
        """Return whether the driver has the facts (address, GPUs, ...) of all tasks, and ``told`` is among them.

        A task that connects again, because its connection broke, sends the same facts as before, and gets the driver's
        answer again. A task that Spark has started again sends other facts.
        """
        return self._complete.get(told.partition) == told

    def take(self, writer: asyncio.StreamWriter, told: TaskFacts) -> None:
        """Record the facts (address, GPUs and more) of a task that is connected.

        Raises:
            ValueError: too many connections from tasks are open. At most :data:`_CONNECTIONS_PER_TASK` times the number
                of the run's tasks are allowed.
        """
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
        """Return the facts of the tasks that Spark has started last (the newest wave), by connection."""
        newest = max(self.here.values(), key=lambda told: told.attempt, default=None)
        return {writer: told for writer, told in self.here.items() if newest is not None and told.wave == newest.wave}

    @property
    def told(self) -> int:
        """The number of connected tasks that have sent their facts (address, GPUs and more).

        Only tasks of the newest wave (those that Spark has started last) are counted, since earlier tasks may still be
        connected.
        """
        return min(len(self._current()), self.tasks)

    def forget(self, writer: asyncio.StreamWriter) -> None:
        self.here.pop(writer, None)
        self._answered.discard(writer)

    def give_up(self) -> None:
        """Stop waiting for the facts of tasks that cannot reach the driver.

        All tasks must then exchange their facts through Spark's ``allGather``.
        """
        self.given_up = True

    def start_again(self) -> bool:
        """Return whether :attr:`accept` has refused the tasks, and forget this refusal.

        Tasks are refused if the run must not begin on the executors on which Spark has placed them. Refused tasks end.
        The driver may then submit the Spark job again, and the new tasks send facts (address, GPUs and more) of their
        own.
        """
        refused, self._refused = self._refused, False
        return refused

    def waiting(self) -> list[asyncio.StreamWriter]:
        """Return the connections of the newest wave's tasks that have got no answer yet, and mark them as answered."""
        waiting = [writer for writer in self._current() if writer not in self._answered]
        self._answered.update(waiting)
        return waiting

    @property
    def settled(self) -> bool:
        """Whether all tasks have sent their facts (address, GPUs and more) and were accepted or refused."""
        return bool(self._complete) or self._refused

    def answer(self) -> Message | None:
        """Return the driver's answer to all tasks, or ``None`` while the facts of some tasks are missing."""
        if self.given_up:
            return Gather()
        if self._refused:
            return Stop("the driver has refused Spark's placement of the ranks")
        if not self._complete:
            return None
        return AllFacts(tuple(told.facts for told in self._complete.values()))
