"""How many ranks the next job of a run has, if the user allows a range."""

from __future__ import annotations

from collections.abc import Iterator

from distributor.values.job import Widths

#: Seconds to wait for more slots: executors come up one by one, and the tasks of an ended job keep theirs for a moment.
SETTLE = 5.0


def widths(room: int | None, asked: Widths, ranks_per_task: int, waited: float = SETTLE) -> Iterator[int]:
    """Yield the numbers of ranks that the next job may have, the largest first; none if the job should wait for slots.

    ``room`` is the number of ranks that free slots can host; if it is not known, only the smallest number is yielded.
    It last grew ``waited`` seconds ago.

    >>> asked = Widths(4, 16)
    >>> [list(widths(room, asked, 2, 0.0)) for room in (3, 6, 20)]
    [[], [], [16, 14, 12, 10, 8, 6, 4]]
    >>> list(widths(7, asked, 2, 6.0)), list(widths(None, asked, 1, 0.0))
    ([6, 4], [4])
    """
    most = asked.least if room is None else min(room, asked.most)
    if room is not None and most < asked.most and waited < SETTLE:
        return
    for width in range(most, asked.least - 1, -1):
        if width % ranks_per_task == 0:
            yield width
