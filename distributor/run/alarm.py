"""Calls functions in a separate thread, at once or after a delay. Requesting a call never blocks."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Hashable

from distributor.text import notices

_log = notices.logger


class Alarm:
    """Calls functions when they are due, one after another, in one thread.

    >>> alarm = Alarm()
    >>> alarm.start()
    >>> alarm.after(5.0, run.kill)  # doctest: +SKIP
    >>> alarm.close()
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Hashable, Callable[[], object]]] = []
        self._keyed: dict[Hashable, float] = {}  # when the next call with each key is due
        self._numbers = itertools.count()  # orders functions that are due at the same moment
        self._changed = threading.Condition()
        self._closed = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="distributor-alarm", daemon=True).start()

    def after(self, delay: float, call: Callable[[], object], key: Hashable = None) -> None:
        """Call a function after ``delay`` seconds. Of pending calls with one ``key``, only the first due is made."""
        due = time.monotonic() + delay
        with self._changed:
            if self._closed or (key is not None and self._keyed.get(key, due + 1.0) <= due):
                return
            if key is not None:
                self._keyed[key] = due
            heapq.heappush(self._due, (due, next(self._numbers), key, call))
            self._changed.notify()

    def close(self) -> None:
        """Drop all pending calls, and let the thread end. Does not wait for a call in progress."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._keyed.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception as error:  # such as a call of Spark after its context was stopped
                _log.debug("a call that was due failed: %s: %s", type(error).__name__, error)

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next function that is due; ``None`` once the alarm is closed."""
        with self._changed:
            while not self._closed:
                left = self._due[0][0] - time.monotonic() if self._due else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                due, _, key, call = heapq.heappop(self._due)
                if key is None:
                    return call
                if self._keyed.get(key) == due:  # no call that is due earlier has replaced this one
                    del self._keyed[key]
                    return call
        return None
