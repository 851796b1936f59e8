"""Merges identical lines of several ranks, so that they are shown once."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Bytes that each piece of text is assumed to need in addition to the text itself.
OVERHEAD = 512


Key = tuple[int, int]  # rank and stream

#: Used in place of a rank for the distributor's own lines.
NOBODY = -1


@dataclass(eq=False)
class _Entry:
    """A line that one or more ranks have written; ``since`` is when its first copy arrived, on the monotonic clock."""

    number: int
    stream: int
    text: str
    since: float
    ranks: list[int] = field(default_factory=list)


class Fold:
    """Lines that wait for equal lines of other ranks. The lines that a rank writes to one stream stay in order."""

    def __init__(self, all_ranks: int, limit: int) -> None:
        self._all_ranks = all_ranks
        self._limit = limit
        self._size = 0
        self._count = 0
        self._equals: dict[tuple[int, str], list[_Entry]] = {}
        self._last: dict[Key, int] = {}  # the number of the entry of a stream's last line
        self.entries: deque[_Entry] = deque()

    def add(self, rank: int, stream: int, text: str, now: float) -> None:
        """Add a line to the first entry with its text after that of the rank's previous line, or to a new one."""
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
        """Remove and yield lines up to the first that is not due.

        One is due if all ranks have written it, if it is no newer than ``until``, or if too much text waits.
        """
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
