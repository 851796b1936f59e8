"""Folders at URLs, accessed with fsspec (https://filesystem-spec.readthedocs.io), which is installed with torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any


def is_url(where: str) -> bool:
    """Return whether a place for files is a URL rather than the path of a folder.

    >>> is_url("s3://bucket/run"), is_url("/data/run")
    (True, False)
    """
    return "://" in where


class Remote:
    """A folder at a URL. File names are relative paths with slashes.

    >>> Remote("s3://bucket/run").sizes()  # doctest: +SKIP
    {'model.pt': 44040192}
    """

    def __init__(self, url: str) -> None:
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

    @property
    def folder(self) -> Path | None:
        """The path of the folder if the URL leads to this machine's own files, otherwise ``None``."""
        from fsspec.implementations.local import LocalFileSystem

        return Path(self._root) if isinstance(self._fs, LocalFileSystem) else None

    def check(self, name: str) -> None:
        """Check that the folder can be used: write, find and remove an empty file."""
        self.mark(name)
        try:
            if not self.has(name):
                raise OSError("a test file that was just written to the URL cannot be found")
        finally:
            self.remove(name)

    def mark(self, name: str) -> None:
        with _errors():
            self._make_folder(name)
            self._fs.pipe_file(self._at(name), b"")

    def has(self, name: str) -> bool:
        with _errors():
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._at(name)))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, replacing any file that has the name."""
        with _errors():
            self._make_folder(name)
            self._fs.pipe_file(self._at(name), data)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; ``None`` if there is no such file."""
        try:
            with _errors():
                return bytes(self._fs.cat_file(self._at(name)))
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; ``None`` if there is no such file."""
        try:
            with _errors():
                self._fs.invalidate_cache()
                about = self._fs.info(self._at(name))
                if about.get("type") == "directory":
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._at(name))
                return int(about["size"])
        except FileNotFoundError:
            return None

    def folders(self) -> list[tuple[str, float | None]]:
        """Return the top-level folders that hold files, each with the time of its files' last change, if known."""
        with _errors():
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return []
        start, times = len(self._root) + 1, dict[str, float | None]()
        for name, about in found.items():
            folder, slash, _ = name[start:].partition("/")
            if slash:
                times[folder] = max(filter(None, (times.get(folder), _changed(about))), default=None)
        return list(times.items())

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by name."""
        with _errors():
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True) if self._fs.exists(self._root) else {}
        start = len(self._root) + 1
        return {name[start:]: int(about["size"]) for name, about in found.items() if about["type"] == "file"}

    def put(self, source: str, name: str) -> None:
        with _errors():
            self._make_folder(name)
            self._fs.put_file(source, self._at(name))

    def get(self, name: str, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with _errors():
            self._fs.get_file(self._at(name), target)

    def copy(self, source: str, name: str) -> None:
        with _errors():
            self._fs.cp_file(self._at(source), self._at(name))

    def move(self, source: str, name: str) -> None:
        """Rename a file, replacing any file that has the new name."""
        own = type(self._fs).mv is not self._general_mv  # the general mv treats "*" and "[" in names as patterns
        with _errors():
            if own:
                self._fs.mv(self._at(source), self._at(name))
            else:
                self._fs.cp_file(self._at(source), self._at(name))
                self._fs.rm_file(self._at(source))

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            with _errors():
                self._fs.rm_file(self._at(name))
        except OSError:  # for a missing file, some file systems raise another error than FileNotFoundError
            if self.size(name) is not None:
                raise

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all its files, if the folder exists."""
        with _errors():
            self._fs.invalidate_cache()
            if self._fs.exists(self._at(name)):
                self._fs.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, name: str) -> None:
        with suppress(Exception):  # writing the file will show the error; object stores have no folders
            self._fs.makedirs(os.path.dirname(self._at(name)), exist_ok=True)


def _changed(about: Mapping[str, Any]) -> float | None:
    """Return when a file last changed, in seconds since the epoch; each file system has its own name for this time."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = about.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None


@contextmanager
def _errors() -> Iterator[None]:
    """Turn all exceptions of a file system into ``OSError``, since packages for cloud storage raise their own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
