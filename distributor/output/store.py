"""Where new files of ranks are kept: a folder on the driver, or a URL that all nodes can reach. All methods block."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from distributor.machine.urls import Remote
from distributor.output.file_versions import Put, Remove
from distributor.shipping import tree
from distributor.values.files import Entry, incoming, remove


class OutputStore(Protocol):
    """A place that keeps new files of ranks under relative names with slashes."""

    def apply(self, steps: Iterable[Put | Remove], came: str | None) -> None:
        """Perform steps in order. ``came`` is the temporary name of the file that has arrived. May raise OSError."""

    def discard(self, name: str) -> None:
        """Remove the file with the given name, if it exists. Ignore every ``OSError``."""


class OutputFolder:
    """A folder on this machine. It is created when the first file arrives."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the files by name, without those that have arrived only in part."""
        return tree.sizes(str(self.path))

    def open(self, name: str) -> int:
        """Create an empty file to write to, and return the file's descriptor."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def finish(self, name: str, entry: Entry) -> None:
        """Set the mode and modification time of a received file to those that it had on its node."""
        path = self.path / name
        with suppress(PermissionError, NotImplementedError):  # some file systems have no modes
            os.chmod(path, entry.mode)
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))

    def apply(self, steps: Iterable[Put | Remove], came: str | None) -> None:
        for step in steps:
            path = self.path / step.name
            if isinstance(step, Remove):
                self.discard(step.name)
                continue
            source = came if step.source is None else step.source
            assert source is not None
            if step.source is None:
                os.replace(self.path / source, path)
            else:
                copy = path.with_name(incoming(path.name, 0, 0))
                shutil.copy2(self.path / source, copy)
                os.replace(copy, path)

    def discard(self, name: str) -> None:
        """Remove a file, and the folders that it leaves empty."""
        with suppress(OSError):
            remove(str(self.path), name)


class OutputUrl:
    """A folder behind a URL. Nodes write files there themselves; the driver only copies, moves and removes them."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def apply(self, steps: Iterable[Put | Remove], came: str | None) -> None:
        for step in steps:
            if isinstance(step, Remove):
                self._remote.remove(step.name)
            elif step.source is not None:
                self._remote.copy(step.source, step.name)
            elif came is not None:
                self._remote.move(came, step.name)

    def discard(self, name: str) -> None:
        with suppress(OSError):
            self._remote.remove(name)
