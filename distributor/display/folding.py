"""Identical lines of several ranks, shown once."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Bytes that are counted for a piece of text in memory besides the text.
OVERHEAD = 512


Key = tuple[int, int]  # rank and stream


@dataclass(eq=False)
class _Entry:
    """A line that one or more ranks have said; ``since`` is by the monotonic clock."""

    number: int
    stream: int
    text: str
    since: float
    ranks: list[int] = field(default_factory=list)


class Fold:
    """Lines that wait for their equals of other ranks, in an order that is each rank's own.

    Args:
        all_ranks: by how many ranks a line is said at most.
        limit: bytes that may wait.
    """

    def __init__(self, all_ranks: int, limit: int) -> None:
        self._all_ranks = all_ranks
        self._limit = limit
        self._size = 0
        self._count = 0
        self._equals: dict[tuple[int, str], list[_Entry]] = {}
        self._last: dict[Key, int] = {}  # number of a rank's last entry
        self.entries: deque[_Entry] = deque()

    def add(self, rank: int, stream: int, text: str, now: float) -> None:
        """Adds a line to the first of its equals that the rank may still say, or else as a new one at the end."""
        equals = self._equals.setdefault((stream, text), [])
        place = bisect_right(equals, self._last.get((rank, stream), -1), key=lambda entry: entry.number)
        if place == len(equals):
            entry = _Entry(self._count, stream, text, now)
            equals.append(entry)
            self.entries.append(entry)
            self._count += 1
            self._size += len(text) + OVERHEAD
        equals[place].ranks.append(rank)
        self._last[rank, stream] = equals[place].number

    def leave(self, until: float) -> Iterator[_Entry]:
        """Takes entries out, from the head only: those from before a time, those that are complete or too many."""
        while self.entries:
            head = self.entries[0]
            if head.since > until and len(head.ranks) < self._all_ranks and self._size <= self._limit:
                return
            self.entries.popleft()
            equals = self._equals[head.stream, head.text]
            del equals[0]
            if not equals:
                del self._equals[head.stream, head.text]
            self._size -= len(head.text) + OVERHEAD
            yield head
