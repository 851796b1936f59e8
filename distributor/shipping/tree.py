"""Finds and describes the files below a folder, as they are at one moment."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from typing import NamedTuple

from distributor.shipping import project
from distributor.values.files import Entry, own

_PIECE = 1 << 20


class Stamp(NamedTuple):
    """Values that change when a file changes."""

    size: int
    mtime_ns: int
    inode: int


def stamps(folder: str, apart: Collection[str] = (), failed: list[OSError] | None = None) -> dict[str, Stamp]:
    """Return the stamp of each file below a folder, by relative path with slashes.

    Compiled Python files, folders that are never shipped, the temporary directory, the real paths ``apart``, and links
    to folders or out of the folder are left out. So is what cannot be read; ``failed`` gets the error.
    """
    top = os.path.realpath(folder)
    apart = {*apart, *project.temporary(top)}
    return dict(_below(top, "", top + os.sep, apart, [] if failed is None else failed))


def sizes(folder: str) -> dict[str, int]:
    """Return the sizes in bytes of the files below a folder, by relative path, without this package's own files."""
    return own({path: stamp.size for path, stamp in stamps(folder).items()})


def _below(
    folder: str, inside: str, top: str, apart: Collection[str], failed: list[OSError]
) -> Iterator[tuple[str, Stamp]]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):  # just removed
        return
    except OSError as error:
        failed.append(error)
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if entry.path not in apart and not project.is_skipped(entry.path):
                    yield from _below(entry.path, f"{inside}{entry.name}/", top, apart, failed)
            elif entry.is_file() and not entry.name.endswith((".pyc", ".pyo")) and _is_inside(entry, top):
                yield inside + entry.name, _stamp(entry.stat())
        except FileNotFoundError:  # just removed
            continue
        except OSError as error:
            failed.append(error)


def _is_inside(entry: os.DirEntry[str], top: str) -> bool:
    return not entry.is_symlink() or os.path.realpath(entry.path).startswith(top)


def stamp(path: str) -> Stamp:
    """Return the stamp of one file."""
    return _stamp(os.stat(path))


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def describe(folder: str, path: str) -> Entry:
    """Read a file, and return its description with a digest of its content."""
    digest, size = hashlib.sha256(), 0
    with open(os.path.join(folder, path), "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
        status = os.fstat(file.fileno())
    return Entry(path, size, status.st_mode & 0o777, status.st_mtime_ns, digest.hexdigest())
