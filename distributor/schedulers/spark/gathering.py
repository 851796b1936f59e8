"""Decides whether a task may still be in Spark's ``allGather``, where killing the task may end its executor.

If Spark kills a task while it waits in ``allGather``, or before it enters ``allGather``, the task's executor may end,
too. In a killed task, ``allGather`` raises an exception in a thread of the executor (Spark 4.3, ``accept-connections``
in ``BasePythonRunner``), and any uncaught exception in this thread ends the JVM. So if tasks are just starting, the
driver first orders them to end by themselves. The driver cancels the Spark job only once no task can be in
``allGather`` any more.
"""

from __future__ import annotations

#: Maximum number of seconds from the start of a classic session's tasks until they have left ``allGather``. Before they
#: enter it, they try to reach the driver, which waits for the facts of all tasks.
CLASSIC = 20.0

#: Maximum number of seconds from the start of tasks on Spark Connect until they have left ``allGather``. Unlike tasks
#: of a classic session, they do not try to reach the driver first.
CONNECT = 15.0

#: Number of seconds after which all tasks have left ``allGather`` if one task has: each task polls once a second.
LEAVING = 2.0


def may_last(running_for: float | None, longest: float, left_for: float | None = None) -> bool:
    """Return whether a started task of the run may still be in ``allGather``, or may yet enter it.

    Args:
        running_for: number of seconds since Spark started the latest task; ``None`` if it has not started any.
        longest: maximum number of seconds from the start of the latest task until all tasks have left ``allGather``.
        left_for: number of seconds since the driver noticed that a task had left ``allGather``; ``None`` if it has
            noticed none.

    >>> may_last(None, CLASSIC), may_last(3.0, CLASSIC), may_last(30.0, CLASSIC)
    (False, True, False)
    >>> may_last(3.0, CLASSIC, left_for=1.0), may_last(3.0, CLASSIC, left_for=2.5)
    (True, False)
    """
    if running_for is None or running_for > longest:
        return False
    return left_for is None or left_for < LEAVING
