"""Warnings on the screen: who speaks, where the user has not configured logging.

Without any handler, Python shows the bare text of a warning (``logging.lastResort``). In its place stands a handler
that adds the prefix of all lines of the distributor's own, and is silent as soon as there is another one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger("distributor")

Show = Callable[[str], None]


class _LastResort(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        #: The displays of runs that go on: there, a warning has its place above live lines.
        self.displays: list[Show] = []

    def emit(self, record: logging.LogRecord) -> None:
        if logging.lastResort is None or _others(self):
            return
        text = self.format(record)
        for show in self.displays[-1:]:
            show(text)
            return
        with suppress(Exception):  # as logging does: an odd or closed output ends nothing
            print("[distributor] " + text.replace("\n", "\n[distributor] "), file=sys.stderr, flush=True)


def _others(own: logging.Handler) -> bool:
    """Whether warnings reach a handler of the user's."""
    at: logging.Logger | None = logger
    while at is not None:
        if any(handler is not own for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


def show_on(display: Show) -> None:
    """Has warnings shown by the display of a run, which adds the prefix, until :func:`leave`."""
    _handler.displays.append(display)


def leave(display: Show) -> None:
    """Ends :func:`show_on`; harmless if it was not called."""
    with suppress(ValueError):
        _handler.displays.remove(display)


_handler = _LastResort()
logger.addHandler(_handler)
