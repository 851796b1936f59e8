"""How long tasks may wait in Spark's ``allGather``. Pure.

A task that Spark kills before or while it waits there can take its executor along: the exception that ends the wait is
raised in a thread whose end by an exception ends the JVM (Spark 4.3, ``accept-connections`` in ``BasePythonRunner``).
So a run whose tasks are just starting is told to end, and killed once none of its tasks can be there any more.
"""

from __future__ import annotations

#: Most seconds that tasks of a classic session take from their start through ``allGather``: they try to reach the
#: driver first, which waits for all of them.
CLASSIC = 20.0

#: Most seconds that tasks take on Spark Connect, where they do not try.
CONNECT = 15.0

#: Seconds that tasks stay in ``allGather`` after the first one has left it: each polls once a second.
LEAVING = 2.0


def may_last(running_for: float | None, longest: float, left_for: float | None = None) -> bool:
    """Return whether a run's tasks may be in ``allGather``, or on the way to it.

    Args:
        running_for: seconds since Spark has started the latest task; ``None`` if it has started none.
        longest: most seconds that tasks take from their start through ``allGather``.
        left_for: seconds since a task is known to have left it; ``None`` if none is.

    >>> may_last(None, CLASSIC), may_last(3.0, CLASSIC), may_last(30.0, CLASSIC)
    (False, True, False)
    >>> may_last(3.0, CLASSIC, left_for=1.0), may_last(3.0, CLASSIC, left_for=2.5)
    (True, False)
    """
    if running_for is None or running_for > longest:
        return False
    return left_for is None or left_for < LEAVING
