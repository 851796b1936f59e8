"""Handling of Ctrl-C while a caller waits for a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Number of seconds that Ctrl-C waits for the ranks to end, in addition to the grace period.
MARGIN = 10.0


@contextmanager
def plain_interrupts() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt, and do nothing else, inside the ``with`` block.

    PySpark's handler (``SparkContext._do_init``) cancels all jobs of the session before it raises KeyboardInterrupt.
    This would kill the ranks without their grace period.
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
