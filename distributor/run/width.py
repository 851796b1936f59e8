"""Chooses how many ranks the next job of a run has, if the user allows a range."""

from __future__ import annotations

from collections.abc import Iterator

from distributor.values.job import Widths

#: Number of seconds to wait for more slots once there are enough. Executors come up one after the other, and the tasks
#: of a job that has just ended keep their slots for a moment.
SETTLE = 5.0


def widths(room: int | None, asked: Widths, ranks_per_task: int, waited: float = SETTLE) -> Iterator[int]:
    """Yield the numbers of ranks that the next job may have, the largest first; none if the job should wait for slots.

    Args:
        room: number of ranks that free slots can host. If it is not known (``None``), only the smallest allowed number
            is yielded.
        asked: the smallest and the largest number that the user allows.
        ranks_per_task: number of ranks of each task. Only multiples of it are yielded.
        waited: number of seconds since the number of free slots last grew. With the default, the job does not wait for
            more slots.

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
