"""The facts of a run's tasks, gathered by the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple


class Told(NamedTuple):
    """What a task has told: which tasks it was started with, its partition, the number of its attempt, its facts."""

    wave: str
    partition: int
    attempt: int
    facts: dict[str, Any]


class Facts:
    """The facts of tasks whose connections last: once there are those of all, the answer to each.

    Tasks may be started again while the last of those of before are still there. Only the newest wave counts, that of
    the task with the highest number, and in it Spark numbers the tasks that it starts together without gaps: others are
    not of one attempt. Were that not so, all would use Spark's own way.
    """

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        #: Whether they are not going to be complete here.
        self.given_up = False
        #: What is told over each connection.
        self.here: dict[asyncio.StreamWriter, Told] = {}
        self._complete: dict[int, Told] = {}
        self._answered: set[asyncio.StreamWriter] = set()
        #: Whether some tasks have had the facts of all.
        self.begun = False
        #: Whether a run may begin as its tasks are placed.
        self.accept: Callable[[list[dict[str, Any]]], bool] = lambda facts: True
        self._refused = False

    def take(self, writer: asyncio.StreamWriter, told: Told) -> None:
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

    def _current(self) -> dict[asyncio.StreamWriter, Told]:
        """Those of the newest wave."""
        newest = max(self.here.values(), key=lambda told: told.attempt, default=None)
        return {writer: told for writer, told in self.here.items() if newest is not None and told.wave == newest.wave}

    @property
    def told(self) -> int:
        """How many tasks have told their facts."""
        return min(len(self._current()), self.tasks)

    def forget(self, writer: asyncio.StreamWriter) -> None:
        self.here.pop(writer, None)
        self._answered.discard(writer)

    def give_up(self) -> None:
        """They will not be complete."""
        self.given_up = True

    def start_again(self) -> bool:
        """Forgets that the tasks were refused, if they were; those have ended."""
        refused, self._refused = self._refused, False
        return refused

    def waiting(self) -> list[asyncio.StreamWriter]:
        """Connections to answer to, each once."""
        waiting = [writer for writer in self._current() if writer not in self._answered]
        self._answered.update(waiting)
        return waiting

    @property
    def settled(self) -> bool:
        """Whether all were here, and may begin or not."""
        return bool(self._complete) or self._refused

    def answer(self) -> dict[str, Any] | None:
        """What all are told; ``None`` as long as some are missing."""
        if self.given_up:
            return {"order": "gather"}
        if self._refused:
            return {"order": "stop", "reason": "Spark has placed the tasks badly"}
        if not self._complete:
            return None
        return {"order": "facts", "facts": [told.facts for told in self._complete.values()]}
