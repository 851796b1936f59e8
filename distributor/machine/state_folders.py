"""The folders in shared memory in which the nodes of a run keep the newest states of ranks.

A rank's state is what it passes to ``save_checkpoint``: tensors, kept in a file of their own, and other objects.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distributor.machine import folders
from distributor.machine.shared_memory import FOLDER
from distributor.text.wording import mebibytes
from distributor.values import layout

#: The rest of a folder's name after the run's ID: the job's first attempt, unless the run's own, and random characters.
_REST = re.compile(r"(?:-(\d+))?-\w{8}")


@dataclass(frozen=True)
class StateFolder:
    """One node's folder in shared memory, in which the node's ranks keep their newest states."""

    path: str
    attempt: int  # the first of the job to which the folder belongs

    @property
    def size(self) -> int:
        """Bytes of the tensors in the folder."""
        return sum(map(_size, Path(self.path).glob("*-[01]")))

    @property
    def is_complete(self) -> bool:
        """Whether this folder shows that all ranks of its job, on all nodes, have saved a state.

        A rank begins its second save only after all ranks have ended their first. Records of a first and of a second
        save therefore show it.
        """
        try:
            names = os.listdir(self.path)
        except OSError:  # removed meanwhile
            return False
        return all(any(name.endswith(f"-{slot}.record") for name in names) for slot in (0, 1))


def path_for(private: str) -> str:
    """Return the path of a node's folder in shared memory, which is named like the node's private folder.

    >>> path_for("/tmp/distributor-3f2a-2-abcd1234")
    '/dev/shm/distributor-3f2a-2-abcd1234'
    """
    return f"{FOLDER}/{os.path.basename(private)}"


def find(run_id: str) -> list[StateFolder]:
    """Return the state folders of a run's nodes on this machine, except folders that other users can access."""
    begin, states = f"{layout.PREFIX}{run_id}", []
    for name in sorted(os.listdir(FOLDER)):
        match = _REST.fullmatch(name.removeprefix(begin)) if name.startswith(begin) else None
        with suppress(OSError):  # removed meanwhile
            if match is not None and folders.is_private(path := f"{FOLDER}/{name}"):
                states.append(StateFolder(path, int(match[1] or 0)))
    return states


def create_file(path: Path, size: int, limit: int) -> None:
    """Create a file for a rank's tensors, and reserve its memory. ``limit`` is for all such files in the folder."""
    with folders.locked(path.with_name("lock")):  # without the lock, processes would claim the same free memory
        free = max(0, limit - sum(map(_size, path.parent.glob("*-[01]"))))
        if size > free:
            raise OSError(
                f"a rank needs {mebibytes(size)} of shared memory, but only {mebibytes(free)} are left for its node. "
                "The nodes on a machine may together use half of the shared memory that was free when the run began. "
                "Provide more (in a container, for example with docker run --shm-size)"
            )
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.ftruncate(descriptor, size)  # before its memory: other processes count it from the start
    try:
        os.posix_fallocate(descriptor, 0, size)  # if a page could not be provided later, the rank would get SIGBUS
    except OSError:
        path.unlink()  # it has its size, but not the memory
        raise
    finally:
        os.close(descriptor)


def write_beside(path: Path, objects: bytes, record: bytes) -> None:
    """Write a rank's objects, and last its record, which makes the state valid, beside the file of its tensors."""
    path.with_suffix(".objects").write_bytes(objects)
    part = path.with_suffix(".part")
    part.write_bytes(record)
    os.replace(part, path.with_suffix(".record"))


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # another process has just removed it
        return path.stat().st_size
    return 0
