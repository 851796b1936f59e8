"""Shows warnings on the screen, after the prefix ``[distributor]``, if the user has not configured logging.

Without any handler, Python shows the bare text of a warning (``logging.lastResort``).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger("distributor")

Show = Callable[[str], None]

_MOST_WAITING = 1000  # lines that wait for a handler that blocks; further ones are left out


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


class _Waiting:
    """Lines for the handlers of the user's log, which a thread passes on as long as there are any."""

    def __init__(self) -> None:
        self._lines: deque[tuple[Show, str]] = deque()  # the first is being passed on
        self._changed = threading.Condition()

    def add(self, show: Show, text: str) -> None:
        with self._changed:
            if len(self._lines) >= _MOST_WAITING:
                return
            self._lines.append((show, text))
            if len(self._lines) > 1:
                return
            thread = threading.Thread(target=self._pass_on, name="distributor-notices", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                return
        self._pass_on()  # no further thread can be started

    def flush(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, timeout)

    def _pass_on(self) -> None:
        while True:
            with self._changed:
                show, text = self._lines[0]
            with suppress(Exception):  # the fault of a handler
                show(text)
            with self._changed:
                self._lines.popleft()
                self._changed.notify_all()
                if not self._lines:
                    return


_waiting = _Waiting()


def warn(text: str) -> None:
    """Log a warning."""
    logger.warning("%s", text)


def soon(show: Show, text: str) -> None:
    """Call :func:`warn` or :func:`inform`, and do not wait for handlers of the user's log.

    One that writes to a full pipe blocks, and with it whoever must answer nodes.
    """
    if _others(_handler):
        _waiting.add(show, text)
    else:
        show(text)


def flush(timeout: float = 10.0) -> None:
    """Wait until handlers of the user's log have what they were to get soon."""
    _waiting.flush(timeout)


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
