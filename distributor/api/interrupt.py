"""Ctrl-C while a run is waited for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds beyond the grace that Ctrl-C waits for the ranks to end before it gives the prompt back.
MARGIN = 10.0


@contextmanager
def plain_interrupts() -> Iterator[None]:
    """While inside, Ctrl-C is a KeyboardInterrupt and nothing else.

    PySpark's handler cancels all jobs of the session before it raises one (``SparkContext._do_init``): the ranks would
    be gone before anybody could give them their grace period.
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
