"""Which rows of a table each global batch has: pure, without communication, and the same for every number of ranks.

The table is cut into *units* of equal size. A permutation of the units is laid out in a row, and cut into *lanes* of
equal length. A lane shuffles its rows within *windows*, and each global batch takes the same number of rows of each
lane. A rank has the same lanes as its neighbours have in number, so all ranks have the same number of batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from distributor.data.source import misfit
from distributor.errors import ConfigurationError

Rows = Any  # an array of int64

_WORD = (1 << 64) - 1
_ROUNDS = 3
_LEAST_DIGIT = 8  # below, a permutation of few rounds has too few forms

UNIT_BYTES = 8 << 10  # read at once
WINDOW_BYTES = 64 << 20  # of all windows together


def hashed(*parts: int) -> int:
    """Return 64 bits that depend on all parts: SplitMix64's finalizer over each.

    Source: https://prng.di.unimi.it/splitmix64.c
    """
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state


class Permutation:
    """A permutation of ``range(size)`` that is computed where it is needed: a Feistel network on two digits.

    Each half of a round adds to one digit what a table of random numbers has for the other. A result beyond ``size`` is
    permuted again until it is within. Own code, since NumPy's streams may change.

    Source: https://doi.org/10.1007/3-540-45760-7_9 (Black and Rogaway, Ciphers with Arbitrary Finite Domains)
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._low = max(_LEAST_DIGIT, math.isqrt(max(size - 1, 0)) + 1)
        self._high = max(_LEAST_DIGIT, -(-size // self._low))
        self._rounds = [
            (_table(hashed(key, step, 0), self._low, self._high), _table(hashed(key, step, 1), self._high, self._low))
            for step in range(_ROUNDS)
        ]

    def at(self, positions: Rows) -> Rows:
        """Return what stands at each position."""
        values = self._step(positions)
        while len(beyond := np.flatnonzero(values >= self.size)):
            values[beyond] = self._step(values[beyond])
        return values

    def _step(self, values: Rows) -> Rows:
        high, low = np.divmod(values, self._low)
        for to_high, to_low in self._rounds:
            high += to_high.take(low)
            high %= self._high
            low += to_low.take(high)
            low %= self._low
        high *= self._low
        high += low
        return high

    def position_of(self, value: int) -> int:
        """Return where ``value`` stands."""
        while True:
            high, low = divmod(value, self._low)
            for to_high, to_low in reversed(self._rounds):
                low = (low - int(to_low[high])) % self._low
                high = (high - int(to_high[low])) % self._high
            value = high * self._low + low
            if value < self.size:
                return value


def _table(key: int, size: int, below: int) -> Rows:
    """Return ``size`` random numbers: SplitMix64's output from a state."""
    words = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((words ^ (words >> np.uint64(31))) % np.uint64(below)).astype(np.int64)


def unit_rows(row_bytes: float) -> int:
    """Return the number of rows of a unit."""
    return max(1, int(UNIT_BYTES / max(row_bytes, 1.0)))


def window_rows(row_bytes: float, lanes: int, per_lane: int) -> int:
    """Return the number of rows of a lane's window: a multiple of its rows in one batch."""
    return max(1, int(WINDOW_BYTES / max(row_bytes, 1.0)) // lanes // per_lane) * per_lane


def check_batch(lanes: int, global_batch_size: int) -> None:
    """Raise a ConfigurationError unless a global batch has the same number of rows of each lane."""
    if global_batch_size < 1 or global_batch_size % lanes:
        below = global_batch_size // lanes * lanes
        nearest = f"{lanes}" if below <= 0 else f"{below} or {below + lanes}"
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} must be a positive multiple of the data's {lanes} lanes, since a "
            f"batch has the same number of rows of each: take {nearest}, or another number of lanes, Data(..., lanes=N)"
        )


def lanes_of(lanes: int, rank: int, world_size: int) -> range:
    """Return a rank's lanes."""
    if lanes % world_size:
        raise ConfigurationError(misfit(lanes, world_size))
    share = lanes // world_size
    return range(rank * share, (rank + 1) * share)


@dataclass(frozen=True)
class RowOrder:
    """The order of rows in one epoch.

    Attributes:
        rows: number of rows of the table.
        unit: number of rows of a unit; the table's last unit may have fewer.
        lanes: number of lanes.
        per_lane: number of rows of each lane in a global batch.
        window: number of rows of a lane's window, a multiple of ``per_lane``.
        seed, epoch: choose the order.
        shuffle: whether rows are permuted; otherwise lanes are consecutive parts of the table.
        drop_last: whether rows that fill no batch are left out; otherwise rows are repeated and marked as not valid.
    """

    rows: int
    unit: int
    lanes: int
    per_lane: int
    window: int
    seed: int
    epoch: int
    shuffle: bool = True
    drop_last: bool = True

    @cached_property
    def lane_rows(self) -> int:
        """Number of a lane's rows; without ``drop_last``, some of the last lanes' rows are repeated ones."""
        return self.rows // self.lanes if self.drop_last else -(-self.rows // self.lanes)

    @cached_property
    def steps(self) -> int:
        """Number of batches."""
        return self.lane_rows // self.per_lane if self.drop_last else -(-self.lane_rows // self.per_lane)

    def window_at(self, lane: int, step: int) -> tuple[int, int]:
        """Return the steps between which a lane's window of this step lies.

        First windows have different lengths, so that not all lanes read a new one at the same step.
        """
        length = self.window // self.per_lane
        first = max(1, (lane + 1) * length // self.lanes)
        if step < first:
            return 0, min(first, self.steps)
        start = first + (step - first) // length * length
        return start, min(start + length, self.steps)

    def pieces(self, lane: int, start: int, stop: int) -> tuple[Rows, Rows]:
        """Return the first rows, and the numbers of rows, of the table's pieces between two positions of a lane.

        Positions beyond the lane's end, or the table's, continue at the table's begin.
        """
        firsts: list[Rows] = []
        counts: list[Rows] = []
        begin, end = lane * self.lane_rows + start, lane * self.lane_rows + stop
        while begin < end:  # one round, unless rows are repeated
            position = begin % self.rows
            taken = min(end - begin, self.rows - position)
            first, count = self._within(position, position + taken)
            firsts.append(first)
            counts.append(count)
            begin += taken
        return np.concatenate(firsts), np.concatenate(counts)

    def _within(self, begin: int, end: int) -> tuple[Rows, Rows]:
        if not self.shuffle:
            return np.array([begin]), np.array([end - begin])
        short, missing = self._short
        low = begin // self.unit if begin < (short + 1) * self.unit - missing else (begin + missing) // self.unit
        high = -(-end // self.unit) if end <= (short + 1) * self.unit - missing else -(-(end + missing) // self.unit)
        order = np.arange(low, high)
        starts = order * self.unit - np.where(order > short, missing, 0)  # in the permuted sequence
        sizes = np.where(order == short, self.unit - missing, self.unit)
        skipped = np.maximum(begin - starts, 0)
        counts = np.minimum(starts + sizes, end) - starts - skipped
        return self._units.at(order) * self.unit + skipped, counts

    @cached_property
    def _units(self) -> Permutation:
        return Permutation(-(-self.rows // self.unit), hashed(self.seed, self.epoch, 0))

    @cached_property
    def _short(self) -> tuple[int, int]:
        """The position of the unit that has fewer rows than others, and how many it lacks."""
        return self._units.position_of(self._units.size - 1), -self.rows % self.unit

    def order(self, lane: int, start: int, stop: int) -> Rows:
        """Return the order of a window's rows, as positions from its start."""
        rows = stop - start
        if not self.shuffle:
            return np.arange(rows)
        first = hashed(self.seed, self.epoch, lane, start) % self.window
        order = self._window_order[first : first + self.window]
        return order if rows == self.window else order[order < rows]

    @cached_property
    def _window_order(self) -> Rows:
        """A permutation, twice: all windows share it, and each begins at another place."""
        return np.tile(Permutation(self.window, hashed(self.seed, self.epoch, 1)).at(np.arange(self.window)), 2)

    def is_valid(self, lane: int, positions: Rows) -> Any:
        """Return whether each position of a lane is a row that no other position repeats."""
        return (positions < self.lane_rows) & (lane * self.lane_rows + positions < self.rows)

    def batch(self, step: int) -> Rows:
        """Return the table's rows of a global batch, lane after lane: what ranks read piece by piece."""
        return np.concatenate([self._of_lane(lane, step) for lane in range(self.lanes)])

    def _of_lane(self, lane: int, step: int) -> Rows:
        begin, end = self.window_at(lane, step)
        start, stop = begin * self.per_lane, end * self.per_lane
        firsts, counts = self.pieces(lane, start, stop)
        rows = np.concatenate([np.arange(first, first + count) for first, count in zip(firsts, counts)])
        ordered = rows[self.order(lane, start, stop)]
        return ordered[step * self.per_lane - start : (step + 1) * self.per_lane - start]
