"""Writes the ranks' output to files on the driver, in a thread of its own: a slow disk holds up no node."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path

_MOST_WAITING = 64 << 20  # bytes; a caller with more waits

_PATIENCE = 60.0  # seconds without progress after which the rest is given up at the end


class LogFiles:
    """The files in one folder. ``error`` is the first in writing them: they are incomplete from then on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: OSError | None = None
        self._waiting: deque[tuple[str, int, bytes]] = deque()  # the first is being written
        self._size = 0  # bytes that wait
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Take a piece of a file, and wait for the disk only if very much has been taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._size < _MOST_WAITING or self.error is not None)
            if self.error is not None or self._closed:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="distributor-log-files", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no further thread can be started
                    self._write(name, offset, data)
                    return
                self._thread = thread
            self._waiting.append((name, offset, data))
            self._size += len(data)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all that was taken is written, but not if for :data:`_PATIENCE` seconds nothing is."""
        with self._changed:
            while (size := self._size) and self.error is None:
                if not self._changed.wait_for(lambda: self._size < size or self.error is not None, _PATIENCE):
                    self._fail(TimeoutError(f"nothing could be written for {_PATIENCE:g} s"))

    def close(self) -> None:
        """Write what was taken, and end the thread."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                name, offset, data = self._waiting[0]
            self._write(name, offset, data)
            with self._changed:
                if self._waiting:
                    self._waiting.popleft()
                    self._size -= len(data)
                    self._changed.notify_all()

    def _write(self, name: str, offset: int, data: bytes) -> None:
        try:
            # Opened each time: a large run may have more files than a process may have open.
            descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                while data:
                    count = os.pwrite(descriptor, data, offset)
                    offset, data = offset + count, data[count:]
            finally:
                os.close(descriptor)
        except OSError as error:  # such as a full disk: training goes on, and the user is told at the end
            with self._changed:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = self.error or error
        self._waiting.clear()
        self._size = 0
        self._changed.notify_all()
