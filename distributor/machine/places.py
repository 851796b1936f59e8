"""Places for files that all nodes see, such as the place for checkpoints. A place is a folder or a URL."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from distributor.machine.urls import Remote, is_url

PAUSES = (0.1, 0.3, 1.0, 3.0, 9.0)  # seconds before each further attempt, after a call to a URL has failed

T = TypeVar("T")


class Place(Protocol):
    """A place that keeps files under relative names with slashes. All methods block, and may raise an ``OSError``."""

    @property
    def root(self) -> Path | None:
        """The path of a place that is a folder; ``None`` for a URL, to which files must be uploaded."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, so that it survives a loss of power once this method has returned."""

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; ``None`` if there is no such file."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; ``None`` if there is no such file."""

    def folders(self) -> list[tuple[str, float | None]]:
        """Return the top-level folders, each with the time of its last change if known. The list may be out of date."""

    def upload(self, source: str, name: str) -> None:
        """Bring a local file to the place. The file is moved if the place is a folder, and copied if it is a URL."""

    def settle(self, name: str) -> None:
        """Make the names of all files in a folder survive a loss of power."""

    def download(self, name: str, target: str) -> None:
        """Copy a file of the place to a local path."""

    def remove_file(self, name: str) -> None:
        """Remove a file, if it exists."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder and all files in it."""


def open_place(where: str, writer: str = "") -> Place:
    """Return the place at a path or URL. ``writer`` tells processes apart that write the same names at a time."""
    return Url(Remote(where)) if is_url(where) else Folder(Path(where), writer)


class Folder:
    """A place that is a folder, usually on a file system that all nodes share. It is created when written to."""

    def __init__(self, path: Path, writer: str = "") -> None:
        self._path = path
        self._end = f".{writer}.part" if writer else ".part"

    @property
    def root(self) -> Path | None:
        return self._path

    def write(self, name: str, data: bytes) -> None:
        target = self._path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}{self._end}")
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        sync_folder(target.parent)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, name: str) -> int | None:
        try:
            found = os.stat(self._path / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self._path / name))
        return found.st_size

    def folders(self) -> list[tuple[str, float | None]]:
        found: list[tuple[str, float | None]] = []
        with suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        found.append((entry.name, _changed(entry.path)))
                except FileNotFoundError:
                    continue
                except OSError:  # whoever reads its files will learn why
                    found.append((entry.name, None))
        return found

    def upload(self, source: str, name: str) -> None:
        target = self._path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)

    def settle(self, name: str) -> None:
        for path, _, _ in os.walk(self._path / name):
            sync_folder(Path(path))
        sync_folder(self._path)

    def download(self, name: str, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(self._path / name, target)

    def remove_file(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path / name)

    def remove_folder(self, name: str) -> None:
        shutil.rmtree(self._path / name, ignore_errors=True)


def _changed(path: str) -> float:
    """Return when a folder or anything in it last changed, in seconds since the epoch."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    newest = os.stat(path).st_mtime
    for folder, _, names in os.walk(path, onerror=fail):
        for name in names:
            with suppress(FileNotFoundError):
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
    return newest


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a loss of power. Network file systems that refuse fsync(2) need no fsync."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Url:
    """A place at a URL. A call that fails is tried again after each of the pauses in :data:`PAUSES`.

    Once a call has failed in spite of this, only the first two pauses count, until a call succeeds. So it does not take
    long to learn that a store fails as a whole, however many files it has.
    """

    root = None

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._has_failed = False

    def write(self, name: str, data: bytes) -> None:
        self._retry(lambda: self._remote.write(name, data))

    def read(self, name: str) -> bytes | None:
        return self._retry(lambda: self._remote.read(name))

    def size(self, name: str) -> int | None:
        return self._retry(lambda: self._remote.size(name))

    def folders(self) -> list[tuple[str, float | None]]:
        return self._retry(self._remote.folders)

    def upload(self, source: str, name: str) -> None:
        self._retry(lambda: self._remote.put(source, name))

    def settle(self, name: str) -> None:
        pass

    def download(self, name: str, target: str) -> None:
        self._retry(lambda: self._remote.get(name, target))

    def remove_file(self, name: str) -> None:
        self._retry(lambda: self._remote.remove(name))

    def remove_folder(self, name: str) -> None:
        self._retry(lambda: self._remote.remove_folder(name))

    def _retry(self, call: Callable[[], T]) -> T:
        for pause in (*(PAUSES[:2] if self._has_failed else PAUSES), None):
            try:
                found = call()
            except OSError as error:
                self._has_failed = pause is None
                if pause is None or isinstance(error, IsADirectoryError):
                    raise
                time.sleep(pause)
            else:
                break
        self._has_failed = False
        return found
