"""What a Spark Connect server tells of its queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Progress:
    """Whether a Spark Connect server has started a run's tasks, by what it tells of its queries (Spark 4).

    Args:
        tasks: how many there are; queries with as many are not told apart.
    """

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._queued = False
        self._started = False

    @property
    def waiting(self) -> bool:
        """Whether the query is known and none of its tasks has ever run."""
        return self._queued and not self._started

    def __call__(self, stages: Iterable[Any], inflight_tasks: int, operation_id: str, done: bool) -> None:
        """Called by PySpark every two seconds or so."""
        if any(stage.num_tasks == self._tasks for stage in stages):
            self._queued = True
            self._started = self._started or inflight_tasks > 0
