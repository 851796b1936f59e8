"""Handling of Ctrl-C while a caller waits for a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def plain_interrupts() -> Iterator[None]:
    """Inside the ``with`` block, replace PySpark's handler for Ctrl-C by one that only raises KeyboardInterrupt.

    PySpark's (``SparkContext._do_init``) first cancels all jobs of the session: a run whose caller only stops waiting
    would end, and its ranks would get no grace period.
    """
    handler = signal.getsignal(signal.SIGINT)
    sparks = (getattr(handler, "__module__", None) or "").startswith("pyspark.")
    if not sparks or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
