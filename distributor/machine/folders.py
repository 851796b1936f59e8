"""Private folders below the temporary directory: made for one owner, and removed even if that was killed.

A folder's owner locks a file in it for as long as it lives; the kernel drops the lock, however the owner ends. Standard
library only: part of it runs inside Spark's Python workers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

PREFIX = "distributor-"

_OWNER = "owner"

#: Lists what goes with a folder, but lies elsewhere.
_ELSEWHERE = "elsewhere"


def make(run_id: str) -> str:
    """A private folder for one node of a run. Its agent removes it."""
    return tempfile.mkdtemp(prefix=f"{PREFIX}{run_id}-")


def is_private(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is one, and this user's alone: anybody can put something into the temporary directory."""
    about = os.lstat(folder)
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077


def make_private(folder: str) -> None:
    """Makes a folder of a known name, if it is not there.

    Raises:
        OSError: it cannot be made.
        PermissionError: it is there, and not this user's alone.
    """
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not is_private(folder):
        raise PermissionError(f"{folder} is not this user's alone")


def claim(folder: str | os.PathLike[str]) -> IO[bytes]:
    """Locks a folder for as long as the returned file is open."""
    # Under another name until it is locked: who looks for stale folders would take an unlocked owner for a dead one.
    lock = open(os.path.join(folder, f"{_OWNER}.new"), "wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(lock.name, os.path.join(folder, _OWNER))
    return lock


def note_elsewhere(folder: str | os.PathLike[str], paths: Sequence[str]) -> None:
    """Has files outside of a folder removed with it, whoever does that."""
    if paths:
        Path(folder, _ELSEWHERE).write_text("\n".join(paths))


def remove(folder: str | os.PathLike[str]) -> None:
    """Removes a folder, and what goes with it."""
    with suppress(OSError):
        for path in Path(folder, _ELSEWHERE).read_text().splitlines():
            with suppress(OSError):
                os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> None:
    """Removes this user's folders whose owners were killed together with whoever could have removed them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if not is_private(folder):
                continue
            descriptor = os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # gone meanwhile, or not claimed yet
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(descriptor)
