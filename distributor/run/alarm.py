"""One thread with a heap of deadlines, for what a run does later or must not wait for."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from distributor.text import notices

_log = notices.logger


class Alarm:
    """Calls functions at their times, one after another, in one thread.

    Example:
        >>> alarm = Alarm()
        >>> alarm.start()
        >>> alarm.after(5.0, run.kill)  # doctest: +SKIP
        >>> alarm.close()
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()  # for functions with the same deadline, in the order of the calls
        self._changed = threading.Condition()
        self._closed = False

    def start(self) -> None:
        """Start the thread. Calls that became due earlier are made now."""
        threading.Thread(target=self._run, name="distributor-alarm", daemon=True).start()

    def after(self, delay: float, call: Callable[[], object]) -> None:
        """Call a function after ``delay`` seconds; ignored once the alarm is closed."""
        with self._changed:
            if not self._closed:
                heapq.heappush(self._due, (time.monotonic() + delay, next(self._numbers), call))
                self._changed.notify()

    def close(self) -> None:
        """Drop the calls that are not due yet, and let the thread end. Does not wait for a call in progress."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception as error:  # Spark's context may just have been stopped
                _log.debug("a deadline failed: %s: %s", type(error).__name__, error)

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next function that is due; return ``None`` once the alarm is closed."""
        with self._changed:
            while not self._closed:
                left = self._due[0][0] - time.monotonic() if self._due else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
        return None
