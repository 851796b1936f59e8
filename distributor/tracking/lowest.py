"""Chooses among the ranks that report a metric: trackers show one line for each name."""

from __future__ import annotations

from collections.abc import Sequence

from distributor.metrics.table import Row

_PATIENCE = 10.0  # seconds


class LowestRank:
    """Keeps the values of the lowest rank that reports a name.

    Ranks' reports come in any order: until it is known which ranks report a name, values of others than rank 0 wait.
    It is known once rank 0 has reported a later step, or the rank itself something ten seconds later.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._ranks: dict[str, int] = {}  # of each name, the lowest
        self._settled: set[str] = set()  # names whose lowest rank is known
        self._step = -1  # of rank 0
        self._times: dict[int, float] = {}  # of each rank's last row, by its own clock
        self._held: list[Row] = []

    def choose(self, rows: Sequence[Row], *, last: bool = False) -> list[Row]:
        """Return the rows without the values of other ranks; none waits any longer if these are the ``last`` ones.

        >>> lowest = LowestRank()
        >>> [row.values for row in lowest.choose([Row(0, 1, 9.0, 1, {"a": 1, "b": 2}), Row(0, 1, 9.0, 0, {"a": 3})])]
        [{'a': 3}]
        >>> [row.values for row in lowest.choose([Row(0, 2, 9.0, 0, {"a": 4})])]
        [{'b': 2}, {'a': 4}]
        """
        chosen: list[Row] = []
        attempts = sorted({row.attempt for row in rows} | {self._attempt})
        for attempt in attempts:
            of_attempt = [row for row in rows if row.attempt == attempt]
            chosen += self._of_attempt(attempt, of_attempt, last=last or attempt != attempts[-1])
        return chosen

    def _of_attempt(self, attempt: int, rows: Sequence[Row], *, last: bool) -> list[Row]:
        if attempt > self._attempt:  # other ranks than 0 may be missing now
            self._attempt, self._ranks = attempt, {name: 0 for name, rank in self._ranks.items() if rank == 0}
            self._settled, self._step, self._times = {*self._ranks}, -1, {}
        for row in rows:
            self._times[row.rank] = row.time
            if row.rank == 0 and row.step is not None:
                self._step = max(self._step, row.step)
            for name in row.values:
                self._ranks[name] = min(row.rank, self._ranks.get(name, row.rank))
        rows, self._held, chosen = [*self._held, *rows], [], []
        for row in rows:
            is_past = row.step is not None and row.step < self._step
            if last or row.rank == 0 or is_past or self._times[row.rank] >= row.time + _PATIENCE:
                self._settled |= {name for name in row.values if self._ranks[name] == row.rank}
        for row in rows:
            own = {name: value for name, value in row.values.items() if self._ranks[name] == row.rank}
            now = {name: value for name, value in own.items() if name in self._settled}
            later = {name: value for name, value in own.items() if name not in now}
            chosen += [row._replace(values=now)] if now else []
            self._held += [row._replace(values=later)] if later else []
        return chosen
