"""Storage: a folder or a URL in which files are kept under relative names with slashes. All methods block.

A file that :meth:`Storage.write` or :meth:`Storage.move` has put is there in full or not at all, in a folder also after
a loss of power; one that :meth:`Storage.upload` has put is so after :meth:`Storage.sync`. At a URL, the store promises
less: listings may be out of date, moving is copying and removing. URLs are accessed with fsspec
(https://filesystem-spec.readthedocs.io), which is installed with torch.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from distributor.values.files import fitted

PAUSES = (0.1, 0.3, 1.0, 3.0, 9.0)  # seconds before each further attempt, after a call to a URL has failed

T = TypeVar("T")


def is_url(where: str) -> bool:
    """Return whether a place for files is a URL rather than the path of a folder.

    >>> is_url("s3://bucket/run"), is_url("/data/run")
    (True, False)
    """
    return "://" in where


class Storage(Protocol):
    """A place that keeps files. Each method may raise an ``OSError``, and no other error."""

    @property
    def root(self) -> Path | None:
        """The path of a folder; ``None`` for a URL."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, replacing any file that has the name."""

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; ``None`` if there is no such file."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; ``None`` if there is no such file."""

    def folders(self) -> list[str]:
        """Return the names of the top-level folders. The list may be out of date."""

    def changed(self, name: str) -> float | None:
        """Return when a folder or anything in it last changed, in seconds since the epoch; ``None`` if not known."""

    def put(self, source: str, name: str) -> None:
        """Copy a local file to the storage."""

    def upload(self, source: str, name: str) -> None:
        """Bring a local file to the storage: moved if it is a folder, otherwise copied."""

    def get(self, name: str, target: str) -> None:
        """Copy a file of the storage to a local path."""

    def move(self, source: str, name: str) -> None:
        """Rename a file, replacing any file that has the new name."""

    def sync(self, name: str) -> None:
        """Make the names of all files in a folder survive a loss of power; its own, with the next write beside it."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists, and the folders that it leaves empty."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder and all files in it."""


def open_storage(where: str, writer: str = "") -> Storage:
    """Return the storage at a path or URL. ``writer`` tells processes apart that write the same names at a time."""
    return Url(where, PAUSES) if is_url(where) else Folder(Path(where), writer)


class Folder:
    """A folder, usually on a file system that all nodes share. It is created when written to."""

    def __init__(self, path: Path, writer: str = "") -> None:
        self._path = path
        self._end = f".{writer}.part" if writer else ".part"

    @property
    def root(self) -> Path:
        return self._path

    def write(self, name: str, data: bytes) -> None:
        with self._incomplete(name) as part, open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(part.parent)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, name: str) -> int | None:
        try:
            status = os.stat(self._path / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self._path / name))
        return status.st_size

    def folders(self) -> list[str]:
        names = []
        with suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                try:
                    if not entry.is_dir(follow_symlinks=False):
                        continue
                except OSError:  # whoever reads its files will learn why
                    pass
                names.append(entry.name)
        return names

    def changed(self, name: str) -> float | None:
        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        newest = os.stat(self._path / name).st_mtime
        for folder, _, names in os.walk(self._path / name, onerror=fail):
            for each in names:
                with suppress(FileNotFoundError):
                    newest = max(newest, os.stat(os.path.join(folder, each)).st_mtime)
        return newest

    def put(self, source: str, name: str) -> None:
        shutil.copy2(source, self._made(name))

    def upload(self, source: str, name: str) -> None:
        os.replace(source, self._made(name))

    def get(self, name: str, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(self._path / name, target)

    def move(self, source: str, name: str) -> None:
        os.replace(self._path / source, self._made(name))

    def sync(self, name: str) -> None:
        for path, _, _ in os.walk(self._path / name):
            sync_folder(Path(path))

    def remove(self, name: str) -> None:
        path = self._path / name
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        with suppress(OSError):  # the folder contains other files
            while (path := path.parent) != self._path:
                path.rmdir()

    def remove_folder(self, name: str) -> None:
        shutil.rmtree(self._path / name, ignore_errors=True)

    @contextmanager
    def _incomplete(self, name: str) -> Iterator[Path]:
        """Yield a path for the content of a file, which gets its name after the ``with`` block, or is removed."""
        target = self._made(name)
        part = target.with_name(fitted(f".{target.name}", self._end))
        try:
            yield part
            os.replace(part, target)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def _made(self, name: str) -> Path:
        """Return the path of a file whose parent folder exists now."""
        path = self._path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            for above in path.parents:
                if os.path.lexists(above) and not above.is_dir():
                    kind = "a link that leads to no folder" if above.is_symlink() else "a file, not a folder"
                    raise NotADirectoryError(f"{above} is {kind}") from error
            raise
        return path


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a loss of power. Network file systems that refuse fsync(2) need no fsync."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Url:
    """A folder at a URL. A call that fails is tried again after each of ``pauses`` in seconds; none by default.

    Once a call has failed in spite of this, only the first two pauses count, until a call succeeds. So it does not take
    long to learn that a store fails as a whole, however many files it has.

    >>> Url("s3://bucket/run").sizes()  # doctest: +SKIP
    {'model.pt': 44040192}
    """

    root = None

    def __init__(self, url: str, pauses: tuple[float, ...] = ()) -> None:
        try:
            import fsspec
        except ImportError:
            raise OSError("fsspec is not installed") from None
        try:
            filesystem, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # ImportError names the package to install
            raise OSError(str(error)) from None
        self._fs: Any = filesystem
        self._root = str(root).rstrip("/")
        self._general_mv = fsspec.AbstractFileSystem.mv
        self._pauses = pauses
        self._has_failed = False

    @property
    def folder(self) -> Path | None:
        """The path of the folder if the URL leads to this machine's own files, otherwise ``None``."""
        from fsspec.implementations.local import LocalFileSystem

        return Path(self._root) if isinstance(self._fs, LocalFileSystem) else None

    def check(self, name: str) -> None:
        """Check that the URL can be used: write, find and remove an empty file."""
        self.write(name, b"")
        try:
            if self.size(name) is None:
                raise OSError("a test file that was just written to the URL cannot be found")
        finally:
            self.remove(name)

    def write(self, name: str, data: bytes) -> None:
        self._retry(lambda: self._writing(name, "pipe_file", self._at(name), data))

    def read(self, name: str) -> bytes | None:
        def call() -> bytes | None:
            with suppress(FileNotFoundError):
                return bytes(self._fs.cat_file(self._at(name)))
            return None

        return self._retry(call)

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return parts of files, each from one place to another; many stores read them at the same time."""
        names, begins, ends = ([*each] for each in zip(*ranges))

        def call() -> list[Any]:
            found: list[Any] = self._fs.cat_ranges([self._at(name) for name in names], begins, ends, on_error="return")
            for error in found:
                if isinstance(error, BaseException) and not isinstance(error, FileNotFoundError):
                    raise error
            return found

        found = self._retry(call)
        for name, part in zip(names, found):
            if isinstance(part, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._at(name))
        return found

    def size(self, name: str) -> int | None:
        return self._retry(lambda: self._size(name))

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file, by name."""
        start = len(self._root) + 1
        files = self._retry(self._found)
        return {name[start:]: int(entry["size"]) for name, entry in files.items() if entry["type"] == "file"}

    def folders(self) -> list[str]:
        start = len(self._root) + 1
        parts = (name[start:].partition("/") for name in self._retry(self._found))
        return list(dict.fromkeys(folder for folder, slash, _ in parts if slash))

    def changed(self, name: str) -> float | None:
        entries = self._retry(lambda: self._found(self._at(name))).values()
        return max(filter(None, map(_time_of, entries)), default=None)

    def put(self, source: str, name: str) -> None:
        self._retry(lambda: self._writing(name, "put_file", source, self._at(name)))

    def upload(self, source: str, name: str) -> None:
        self.put(source, name)

    def get(self, name: str, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        self._retry(lambda: self._fs.get_file(self._at(name), target))

    def move(self, source: str, name: str) -> None:
        def call() -> None:
            if type(self._fs).mv is not self._general_mv:  # the general one treats "*" and "[" in names as patterns
                self._writing(name, "mv", self._at(source), self._at(name))
            else:
                self._writing(name, "cp_file", self._at(source), self._at(name))
                self._fs.rm_file(self._at(source))

        self._retry(call)

    def sync(self, name: str) -> None:
        pass

    def remove(self, name: str) -> None:
        def call() -> None:
            try:
                self._fs.rm_file(self._at(name))
            except Exception:  # for a missing file, some file systems raise another error than FileNotFoundError
                if self._size(name) is not None:
                    raise

        self._retry(call)

    def remove_folder(self, name: str) -> None:
        path = self._at(name)

        def call() -> None:
            self._fs.invalidate_cache()
            if not self._fs.exists(path):
                return
            if glob.escape(path) == path:
                self._fs.rm(path, recursive=True)
            else:  # rm would take the path as a pattern, and remove other folders
                self._remove_each(path)

        self._retry(call)

    def _remove_each(self, path: str) -> None:
        """Remove a folder's files one by one, and then its folders."""
        found: Mapping[str, Mapping[str, Any]] = self._fs.find(path, withdirs=True, detail=True)
        folders = {path, *(name for name, entry in found.items() if entry["type"] == "directory")}
        for file in found.keys() - folders:
            self._fs.rm_file(file)
        for folder in sorted(folders, reverse=True):
            with suppress(Exception):  # object stores have no folders
                self._fs.rmdir(folder)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _size(self, name: str) -> int | None:
        try:
            self._fs.invalidate_cache()
            entry = self._fs.info(self._at(name))
        except FileNotFoundError:
            return None
        if entry.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._at(name))
        return int(entry["size"])

    def _found(self, path: str | None = None) -> Mapping[str, Mapping[str, Any]]:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            files: Mapping[str, Mapping[str, Any]] = self._fs.find(path or self._root, detail=True)
            return files
        return {}

    def _writing(self, name: str, method: str, *arguments: object) -> None:
        if self._root.startswith("/"):  # others are object stores, without folders: s3fs would make a missing bucket
            with suppress(Exception):  # writing the file will show the error
                self._fs.makedirs(os.path.dirname(self._at(name)), exist_ok=True)
        getattr(self._fs, method)(*arguments)

    def _retry(self, call: Callable[[], T]) -> T:
        """Call, and turn all exceptions into ``OSError``: packages for cloud storage raise their own."""
        for pause in (*(self._pauses[:2] if self._has_failed else self._pauses), None):
            try:
                result = call()
            except Exception as error:
                self._has_failed = pause is None
                if pause is None or isinstance(error, IsADirectoryError):
                    if isinstance(error, OSError):
                        raise
                    raise OSError(f"{type(error).__name__}: {error}") from error
                time.sleep(pause)
            else:
                break
        self._has_failed = False
        return result


def _time_of(entry: Mapping[str, Any]) -> float | None:
    """Return when a file last changed, in seconds since the epoch; each file system has its own name for this time."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = entry.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None
