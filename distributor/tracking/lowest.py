"""Chooses among the ranks that report a metric: trackers show one line for each name."""

from __future__ import annotations

from collections.abc import Sequence

from distributor.metrics.table import Row


class LowestRank:
    """Keeps the values of the lowest rank that reports a name, in each attempt anew."""

    def __init__(self) -> None:
        self._attempt = -1
        self._ranks: dict[str, int] = {}

    def choose(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows without the values of other ranks.

        >>> rows = [Row(0, 1, 9.0, 1, {"a": 1, "b": 2}), Row(0, 1, 9.0, 0, {"a": 3})]
        >>> [row.values for row in LowestRank().choose(rows)]
        [{'b': 2}, {'a': 3}]
        """
        chosen = []
        for attempt in sorted({row.attempt for row in rows}):
            chosen += self._of_attempt(attempt, [row for row in rows if row.attempt == attempt])
        return chosen

    def _of_attempt(self, attempt: int, rows: Sequence[Row]) -> list[Row]:
        if attempt > self._attempt:
            self._attempt, self._ranks = attempt, {}
        for row in rows:
            for name in row.values:
                self._ranks[name] = min(row.rank, self._ranks.get(name, row.rank))
        own = [
            row._replace(values={name: value for name, value in row.values.items() if self._ranks[name] == row.rank})
            for row in rows
        ]
        return [row for row in own if row.values]
