"""Decides whether a task may still be in Spark's ``allGather``, where killing the task may end its executor.

In a killed task, ``allGather`` raises in a thread of the executor (Spark 4.3, ``accept-connections`` in
``BasePythonRunner``), where any uncaught exception ends the JVM. So the driver first orders starting tasks to end by
themselves, and cancels the Spark job once none can be in ``allGather``.
"""

from __future__ import annotations

#: Seconds from the start of tasks until they have left ``allGather``, at most, also where executors are very busy.
#: Classic tasks first try the driver.
CLASSIC = 60.0
CONNECT = 30.0

LEAVING = 2.0  # seconds after which all tasks have left if one has: each polls once a second


class Left:
    """Notes when a task was first known to have left ``allGather``: nodes connect only then."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, reached: bool, now: float) -> float | None:
        """Return for how long that has been known, if nodes have ``reached`` the driver; ``None`` if it is not."""
        if self._since is None and reached:
            self._since = now
        return None if self._since is None else now - self._since


def may_last(running_for: float | None, longest: float, left_for: float | None = None) -> bool:
    """Return whether a task may be in ``allGather``, or may yet enter it.

    The latest task started ``running_for`` seconds ago (``None``: none has), and all leave it ``longest`` seconds after
    their start. That a task had left it was noticed ``left_for`` seconds ago.

    >>> may_last(None, CLASSIC), may_last(3.0, CLASSIC), may_last(70.0, CLASSIC)
    (False, True, False)
    >>> may_last(3.0, CLASSIC, left_for=1.0), may_last(3.0, CLASSIC, left_for=2.5)
    (True, False)
    """
    if running_for is None or running_for > longest:
        return False
    return left_for is None or left_for < LEAVING
