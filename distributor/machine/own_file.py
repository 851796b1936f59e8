"""A file that this process keeps open, even if other code in the process closes the file's descriptor."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class OwnFile:
    """A file that is opened at its first use, and again if other code has closed its descriptor."""

    def __init__(self, path: Path, flags: int) -> None:
        self._path = path
        self._flags = flags | os.O_CLOEXEC
        self._descriptor, self._identity = -1, (0, 0)

    def descriptor(self) -> int:
        with suppress(OSError):
            status = os.fstat(self._descriptor)
            if (status.st_dev, status.st_ino) == self._identity:
                return self._descriptor
        self._descriptor = os.open(self._path, self._flags, 0o600)
        status = os.fstat(self._descriptor)
        self._identity = (status.st_dev, status.st_ino)
        return self._descriptor

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor, self._identity = -1, (0, 0)
