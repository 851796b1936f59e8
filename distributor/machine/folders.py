"""Private folders in the temporary directory, which are removed even if the process that owns them was killed.

The owner keeps a file in the folder locked. The kernel releases the lock when the owner ends, even if it is killed. The
next process that calls :func:`remove_stale` then removes the folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from distributor.values.layout import OWNER, PREFIX

_LITTLE = 64 << 10  # a file system with fewer free bytes counts as full

#: Files in a private folder that list paths outside it, to be removed after an attempt or with the folder.
_ELSEWHERE = "elsewhere"
ELSEWHERE_TO_THE_END = "elsewhere-to-the-end"


def make(job_id: str) -> str:
    """Create a private folder for one node of a run and return its path. The agent or its owner removes the folder."""
    return tempfile.mkdtemp(prefix=f"{PREFIX}{job_id}-")


def unusable() -> str | None:
    """Return why no private folder can be created in the temporary directory; ``None`` if one can."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        return " ".join(filter(None, [error.strerror or str(error), tempfile.tempdir and f"in {tempfile.tempdir}"]))
    return None


def is_private(folder: str | os.PathLike[str]) -> bool:
    """Return whether this is a folder that only this user can access; OSError if there is nothing at this path."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def make_private(folder: str) -> None:
    """Create a folder unless it exists; PermissionError if others can access it, or another user has created it."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not is_private(folder):
        raise PermissionError(f"{folder} belongs to another user, or other users can access it")


def claim(folder: str | os.PathLike[str]) -> IO[bytes]:
    """Make this process the owner of a folder for as long as the returned file, which is locked, is open."""
    # The file gets its name only once it is locked: if remove_stale() finds an unlocked file, the owner counts as dead.
    lock = open(os.path.join(folder, f"{OWNER}.new"), "wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(lock.name, os.path.join(folder, OWNER))
    return lock


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep a file locked during the ``with`` block, creating it if necessary. Other processes wait for the lock."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def note_elsewhere(folder: str | os.PathLike[str], paths: Sequence[str], *, to_the_end: bool = False) -> None:
    """Record paths to remove after each attempt or, with ``to_the_end``, only together with the folder."""
    if paths:
        Path(folder, ELSEWHERE_TO_THE_END if to_the_end else _ELSEWHERE).write_bytes(os.fsencode("\n".join(paths)))


def remove_elsewhere(folder: str | os.PathLike[str]) -> None:
    """Remove the files and folders that :func:`note_elsewhere` recorded for removal after each attempt."""
    _remove_listed(Path(folder, _ELSEWHERE))


def _remove_listed(names: Path) -> None:
    with suppress(OSError):
        for path in names.read_bytes().split(b"\n"):
            _remove_path(path)


def _remove_path(path: str | bytes) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        os.unlink(path)


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove a private folder, and the files and folders elsewhere that :func:`note_elsewhere` recorded in it."""
    remove_elsewhere(folder)
    _remove_listed(Path(folder, ELSEWHERE_TO_THE_END))
    with suppress(OSError):
        for entry in os.listdir(folder):
            if entry != OWNER:  # it goes last: remove_stale() ends what is interrupted here
                _remove_path(os.path.join(folder, entry))
    shutil.rmtree(folder, ignore_errors=True)


def is_full(folder: str | os.PathLike[str]) -> bool:
    """Return whether nothing more can be written to a folder because its file system has no space or no inodes left."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < _LITTLE or (space.f_files > 0 and space.f_favail == 0)


def remove_stale() -> None:
    """Remove this user's private folders whose owners have ended without removing them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if not is_private(folder):
                continue
            descriptor = os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # the folder was removed meanwhile, or has no owner yet
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
        except OSError:  # its owner is alive
            continue
        finally:
            os.close(descriptor)
