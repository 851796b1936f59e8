"""A store that promises as little as object stores may: stale listings, no rename, requests that fail."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from distributor.machine.storage import Storage

#: What all stores of this process hold, by path.
FILES: dict[str, bytes] = {}

#: Called before each operation with its name and path; it may raise an error.
BEFORE: list[Callable[[str, str], None]] = []


class Forgetful(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store whose listings show nothing that was written, and everything that was removed. It cannot rename."""

    protocol = "forgetful"
    cachable = False

    def _begin(self, operation: str, path: str) -> str:
        path = self._strip_protocol(path)
        for call in BEFORE:
            call(operation, path)
        return path

    def _stale(self) -> dict[str, bytes]:
        return {}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        FILES[self._begin("write", path)] = bytes(value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._begin("read", path)
        if path not in FILES:
            raise FileNotFoundError(path)
        return FILES[path][start:end]

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        with open(lpath, "rb") as file:
            FILES[self._begin("upload", rpath)] = file.read()

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        data = self.cat_file(rpath)
        with open(lpath, "wb") as file:
            file.write(data)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._begin("info", path)
        if path in FILES:
            return {"name": path, "size": len(FILES[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in FILES):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        path = self._begin("list", path)
        files = {name: {"name": name, "size": len(data), "type": "file"} for name, data in self._stale().items()}
        return files if detail else list(files)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        raise AssertionError("nobody relies on listings of one folder")

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        path = self._begin("remove", path)
        for name in [name for name in FILES if name == path or name.startswith(f"{path}/")]:
            del FILES[name]

    def rm_file(self, path: str) -> None:
        self.rm(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def mv(self, *_: Any, **__: Any) -> None:
        raise AssertionError("this store cannot rename")


fsspec.register_implementation("forgetful", Forgetful, clobber=True)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of a few megabytes."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fail_every(number: int) -> Callable[[str, str], None]:
    """Returns what lets each so-manyth operation fail."""
    count = 0

    def call(operation: str, path: str) -> None:
        nonlocal count
        count += 1
        if count % number == 0:
            raise ConnectionError(f"503 Slow Down: {operation} {path}")

    return call


class Faulty:
    """A place in which reading some files fails.

    Args:
        storage: holds the files.
        faults: the error of each file, by the end of its name. ``""`` stands for the list of folders.
    """

    def __init__(self, storage: Storage, faults: dict[str, OSError]) -> None:
        self._storage = storage
        self.faults = faults

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if name not in ("read", "size", "get", "folders"):
            return method

        def call(*arguments: str) -> Any:
            file = arguments[0] if arguments else ""
            for end, error in self.faults.items():
                if file.endswith(end) if end else not arguments:
                    raise error
            return method(*arguments)

        return call


def unreadable(path: Path) -> None:
    """Put a file in the place of another whose size is 0, and which nobody can read: ``[Errno 5]``."""
    path.unlink()
    path.symlink_to("/proc/self/mem")
