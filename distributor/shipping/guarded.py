"""Calls users' code, for example to unpickle a value, and gives the call up if it makes no progress for a time."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_LOOK = 0.5  # seconds between checks of a call's progress


class _Call(threading.Thread, Generic[T]):
    """A thread for one call. When the call ends, ``result`` or ``raised`` holds its outcome, and ``ended`` is set."""

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
        """Make the thread end at its next line of Python. A thread in C code ends only once that code returns."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(SystemExit))


def guarded(call: Callable[[], T], patience: float, progress: Callable[[], object] = lambda: None) -> T:
    """Make a call in another thread; TimeoutError if it makes no progress for ``patience`` seconds.

    Progress is a new value of ``progress()`` or an import of new modules. A late call's thread ends as soon as it can.

    >>> guarded(lambda: 6 * 7, 1.0)
    42
    """
    thread = _Call(call)
    try:
        thread.start()
    except RuntimeError:  # no further thread can be started
        return call()
    seen, since = None, time.monotonic()
    while not thread.ended.wait(min(_LOOK, patience)):
        now = progress(), len(sys.modules)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since >= patience:
            thread.give_up()
            raise TimeoutError(f"no progress for {patience:g} s")
    if thread.raised is not None:
        raise thread.raised
    return thread.result
