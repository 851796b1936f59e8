"""Call code of users that the driver must not wait for forever, such as what unpickling a value runs."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: Number of seconds between two looks at the progress of a call.
_LOOK = 0.5


class _Call(threading.Thread, Generic[T]):
    """A thread for one call. ``ended`` is set once ``result`` or ``raised`` is there."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__(name="distributor-guarded", daemon=True)
        self._call = call
        self.ended = threading.Event()
        self.result: T
        self.raised: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.raised = error
        finally:
            self.ended.set()

    def give_up(self) -> None:
        """Have the thread end at its next line of Python. One that waits in C code stays until that returns."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(SystemExit))


def guarded(call: Callable[[], T], patience: float, progress: Callable[[], object] = lambda: None) -> T:
    """Make a call and return its result, or raise what it raises.

    Args:
        call: the call. It runs in a thread of its own.
        patience: number of seconds that the call may take without progress. An import of new modules is progress.
        progress: returns a value that changes as the call gets on.

    Raises:
        TimeoutError: the call did not end in time. Its thread ends as soon as it can.

    Example:
        >>> guarded(lambda: 6 * 7, 1.0)
        42
    """
    thread = _Call(call)
    try:
        thread.start()
    except RuntimeError:  # there can be no further thread
        return call()
    seen, since = None, time.monotonic()
    while not thread.ended.wait(min(_LOOK, patience)):
        now = progress(), len(sys.modules)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since >= patience:
            thread.give_up()
            raise TimeoutError(f"it did not end within {patience:g} s")
    if thread.raised is not None:
        raise thread.raised
    return thread.result
