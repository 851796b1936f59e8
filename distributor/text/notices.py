"""Shows warnings on the screen, after the prefix ``[distributor]``, if the user has not configured logging.

Without any handler, Python shows the bare text of a warning (``logging.lastResort``).
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
        super().__init__()
        #: The displays of active runs. The newest shows each warning, above its own progress bar and status.
        self.displays: list[Show] = []

    def emit(self, record: logging.LogRecord) -> None:
        if logging.lastResort is None or _others(self):
            return
        text = self.format(record)
        for show in self.displays[-1:]:
            show(text)
            return
        with suppress(Exception):  # like logging, ignore the errors of an unusual or closed stderr
            print("[distributor] " + text.replace("\n", "\n[distributor] "), file=sys.stderr, flush=True)


def _others(ignored: logging.Handler) -> bool:
    """Return whether warnings reach a handler other than this module's."""
    at: logging.Logger | None = logger
    while at is not None:
        if any(handler is not ignored for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


def inform(text: str) -> None:
    """Show a line that is no warning: if the user has configured logging, only from level ``INFO`` on."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        _handler.emit(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))


def show_on(display: Show) -> None:
    """Show warnings on a run's display until :func:`leave` is called."""
    _handler.displays.append(display)


def leave(display: Show) -> None:
    """Undo :func:`show_on`, if it was called for this display."""
    with suppress(ValueError):
        _handler.displays.remove(display)


_handler = _LastResort()
logger.addHandler(_handler)
