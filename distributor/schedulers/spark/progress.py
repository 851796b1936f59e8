"""The progress that a Spark Connect server reports for its queries."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any


class StageProgress:
    """Finds out whether a Spark Connect server has started the tasks of a run's query (Spark 4).

    Other queries with the same number of tasks are mistaken for it.
    """

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._submitted = time.monotonic()
        self._queued = False
        self._started: float | None = None

    @property
    def waiting(self) -> bool:
        """Whether the server has reported the query, but has not run any of its tasks yet."""
        return self._queued and self._started is None

    def running_for(self, now: float) -> float | None:
        """Return for how many seconds tasks may have run, at most; ``None`` if the server has not started them."""
        if self.waiting:
            return None
        return now - (self._submitted if self._started is None else self._started)

    def __call__(self, stages: Iterable[Any], inflight_tasks: int, operation_id: str, done: bool) -> None:
        """Record the progress of a query. PySpark calls this about every two seconds."""
        if any(stage.num_tasks == self._tasks for stage in stages):
            self._queued = True
            if self._started is None and inflight_tasks > 0:
                self._started = time.monotonic()
