"""Calls that several threads make at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns or raises."""
    barrier = threading.Barrier(len(calls))
    ends: list[Any] = [None] * len(calls)

    def make(index: int) -> None:
        barrier.wait()
        try:
            ends[index] = calls[index]()
        except Exception as error:
            ends[index] = error

    callers = [threading.Thread(target=make, args=(index,)) for index in range(len(calls))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return ends
