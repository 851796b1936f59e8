"""Calls the user's callbacks on the driver, one after another, in a thread of their own."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributor.metrics.driver import News, NodeSample
from distributor.metrics.ended import EndedAttempt
from distributor.metrics.table import Row
from distributor.text import notices
from distributor.values.reports import Committed

_log = notices.logger

_INTERVAL = 0.5  # seconds between checks for news
PATIENCE = 60.0  # seconds that callbacks have to finish once the run, or the study, has ended


class Callbacks:
    """Calls the methods that the user's objects have. An error in one ends neither the run nor the others."""

    def __init__(self, callbacks: Sequence[Any], label: str, new: Callable[[], Sequence[News]]) -> None:
        self._callbacks = callbacks
        self._label = label  # of the run or study
        self._new = new  # what is new since its last call
        self._events: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._warned: set[tuple[int, str]] = set()
        self._over = threading.Event()  # the thread has ended, or is left running

    @property
    def is_running_here(self) -> bool:
        """Whether the caller runs inside a callback."""
        return threading.current_thread() is self._thread

    def start(self, run: Any) -> None:
        """Start the thread that calls the callbacks, ``on_start`` first."""
        if self._callbacks:
            self._new()  # the first call begins to collect rows, for later calls
            self._begin(run)
            self.tell("on_start")

    def _begin(self, run: Any) -> threading.Thread:
        self._thread = thread = threading.Thread(
            target=self._serve, args=(run,), name="distributor-callbacks", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no further thread can be started, so nobody waits for this one
            self._thread = None
            raise
        return thread

    def tell(self, name: str, *arguments: Any) -> None:
        """Call a method, with the run and ``arguments``, on all callbacks that have it."""
        self._events.put((name, arguments))

    def run_for_ranks(self, run: Any, environ: Mapping[str, str], wanted: Callable[[], bool]) -> str:
        """Return the id of the run in MLflow that rank 0 joins; empty if no callback knows one in time."""
        for callback in self._callbacks:
            if hasattr(callback, "run_for_ranks"):
                try:
                    if found := callback.run_for_ranks(run, environ, wanted):
                        return str(found)
                except Exception as error:
                    self._warn(callback, "run_for_ranks", error)
        return ""

    def close(self) -> None:
        """Call ``on_end`` after all pending calls, and wait for at most :data:`PATIENCE` seconds.

        While a callback's ``takes_long`` is true, wait until it has finished, or :meth:`leave` is called.
        """
        if self._thread is not None:
            self.tell("on_end")
            self._finish(self._thread)

    def end_study(self, study: Any) -> None:
        """Call ``on_study_end`` with a study, and wait as :meth:`close` does; Ctrl-C leaves what takes long."""
        if self._callbacks:
            self.tell("on_study_end")
            try:
                self._finish(self._begin(study))
            except KeyboardInterrupt:
                if not self.leave():
                    raise

    @property
    def _long(self) -> list[Any]:
        return [each for each in self._callbacks if getattr(each, "takes_long", False)]

    def leave(self) -> bool:
        """Wait no longer for callbacks that take long, and return whether there is one."""
        if self._thread is None or not self._thread.is_alive() or not (left := self._long):
            return False
        for each in left:
            _log.warning("%s: no longer waits for %r, which goes on while this process lives", self._label, each)
        self._over.set()
        return True

    def _finish(self, thread: threading.Thread) -> None:
        self.tell("on_close")
        self._events.put(None)
        if not self._over.wait(PATIENCE) and not (self._long and self._over.wait()):
            _log.warning(
                "%s: a callback is still running %g s after its end; it is left running", self._label, PATIENCE
            )

    def _serve(self, run: Any) -> None:
        try:
            self._call_all(run)
        finally:
            self._over.set()

    def _call_all(self, run: Any) -> None:
        while True:
            try:
                event = self._events.get(timeout=_INTERVAL)
            except queue.Empty:
                self._tell_news(run)
                continue
            self._tell_news(run)
            if event is None:
                return
            self._call(run, *event)

    def _tell_news(self, run: Any) -> None:
        news = self._new()
        while news:  # callbacks hear of the end of an attempt before the rows of the next one
            end = next((count for count, each in enumerate(news, 1) if isinstance(each, EndedAttempt)), len(news))
            self._tell(run, news[:end])
            news = news[end:]

    def _tell(self, run: Any, news: Sequence[News]) -> None:
        if rows := tuple(each for each in news if isinstance(each, Row)):
            self._call(run, "on_metrics", (rows,))
        if samples := tuple(each for each in news if isinstance(each, NodeSample)):
            self._call(run, "on_system_metrics", (samples,))
        for each in news:
            if isinstance(each, Committed):
                self._call(run, "on_checkpoint", (each,))
            elif isinstance(each, EndedAttempt):
                self._call(run, "on_attempt_end", (each,))

    def _call(self, run: Any, name: str, arguments: tuple[Any, ...]) -> None:
        for callback in self._callbacks:
            method = getattr(callback, name, None)
            if method is None:
                continue
            try:
                method(run, *arguments)
            except BaseException as error:  # also SystemExit: it would end the thread
                self._warn(callback, name, error)

    def _warn(self, callback: Any, name: str, error: BaseException) -> None:
        """Log an error in a callback, with file and line, once for each method of a callback."""
        if (id(callback), name) in self._warned:
            return
        self._warned.add((id(callback), name))
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        what = f"{callback.__class__.__name__}.{name}"  # of what a proxy stands for
        _log.warning(
            "%s: %s raised %s: %s%s; this warning is shown once",
            self._label,
            what,
            type(error).__name__,
            error,
            place,
        )
