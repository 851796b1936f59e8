"""The driver's requests for the ranks' stacks, and the ranks' answers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from distributor.outcomes.stacks import Stacks
from distributor.text import cells
from distributor.values.messages import Dump, StackDump as Answer

_SILENT = "its node did not answer: the node has ended, or has no connection to the driver"


class Dumps:
    """The requests for stacks in one run. Any thread may make a request or record an answer."""

    def __init__(self, world_size: Callable[[], int]) -> None:
        self._world_size = world_size
        self._numbers = itertools.count()
        self._answers: dict[int, dict[int, str]] = {}
        self._then: dict[int, Callable[[], object]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def ask(self, timeout: float, *, all_threads: bool, then: Callable[[], object] = lambda: None) -> Dump:
        """Return a request, for the caller to send. ``then`` is called in the thread that records the last answer."""
        with self._changed:
            number = next(self._numbers)
            self._answers[number], self._then[number] = {}, then
        return Dump(number, all_threads, timeout)

    def answer(self, answer: Answer) -> None:
        """Record a rank's first answer, unless the answers were already returned."""
        with self._changed:
            answers = self._answers.get(answer.number)
            if answers is None or answer.rank in answers or answer.rank not in range(self._world_size()):
                return
            answers[answer.rank] = cells.readable(answer.text)
            complete = len(answers) == self._world_size()
            then = self._then[answer.number]
            if complete:
                self._changed.notify_all()
        if complete:
            then()

    def wait(self, request: Dump, timeout: float) -> Stacks:
        """Return the answers once all ranks have answered, or after ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(request), timeout)
            return self._taken(request)

    def take(self, request: Dump) -> Stacks | None:
        """Return the answers so far; ``None`` if they were already returned."""
        with self._changed:
            return self._taken(request) if request.number in self._answers else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_over(self, request: Dump) -> bool:
        return self._closed or len(self._answers[request.number]) == self._world_size()

    def _taken(self, request: Dump) -> Stacks:
        answers = self._answers.pop(request.number)
        del self._then[request.number]
        return Stacks({rank: answers.get(rank, _SILENT) for rank in range(self._world_size())})
