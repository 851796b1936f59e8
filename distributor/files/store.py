"""Where files are kept: a folder of the driver's, or a URL that all nodes reach. These functions block."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from distributor.files.versions import Put, Remove
from distributor.machine.urls import Remote
from distributor.shipping import tree
from distributor.values.files import Entry, incoming, remove


class Store(Protocol):
    """A place for files, by relative names with slashes. All methods may raise an ``OSError``."""

    def apply(self, steps: Iterable[Put | Remove], came: str | None) -> None:
        """Perform steps in order; ``came`` is the name of what has just come."""

    def discard(self, name: str) -> None:
        """Remove what is under a name, if there is anything."""


class Folder:
    """A folder of this machine, which is made when the first file comes.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files in bytes, without those that have come in part."""
        return tree.sizes(str(self.path))

    def open(self, name: str) -> int:
        """Return a descriptor of a new, empty file."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def finish(self, name: str, entry: Entry) -> None:
        """Give a file that has come its mode and its time of change."""
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
                copy = path.with_name(f"{incoming(path.name, 0)}.0")
                shutil.copy2(self.path / source, copy)
                os.replace(copy, path)

    def discard(self, name: str) -> None:
        """Remove a file, and the folders around it that are empty then."""
        with suppress(OSError):
            remove(str(self.path), name)


class Url:
    """A folder behind a URL. Nodes write to it themselves; only names are changed here.

    Args:
        remote: the folder.
    """

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
