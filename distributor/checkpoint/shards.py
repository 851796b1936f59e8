"""The files of a checkpoint: their sizes and digests, and whose file is taken if several ranks wrote the same one."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from distributor.checkpoint.records import Shard
from distributor.errors import ConfigurationError
from distributor.text.wording import who

#: Number of bytes to read at a time.
_PIECE = 4 << 20


def found_in(folder: Path) -> dict[str, Shard]:
    """Return the files in a folder by name. Flush them to the disk, so that they survive a loss of power.

    Each symbolic link to a file is first replaced by a copy of the file. Links to folders, and links that lead nowhere,
    are left out.

    Raises:
        OSError: a file cannot be read, or the disk is too full to replace a symbolic link by a copy of its file.
    """
    names = list(_names(folder))
    for name in names:
        if (folder / name).is_symlink():  # the checkpoint must hold the file itself, and not a link to it
            target = os.path.realpath(folder / name)
            os.unlink(folder / name)
            shutil.copyfile(target, folder / name)
    return {name: measured(folder / name, name) for name in names}


def _names(folder: Path) -> Iterator[str]:
    for path, _, names in os.walk(folder):
        for name in names:
            full = os.path.join(path, name)
            if os.path.isfile(full):
                yield os.path.relpath(full, folder)


def measured(path: Path, name: str) -> Shard:
    """Flush a file to the disk, and return its size and digest."""
    found, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        piece = bytearray(_PIECE)
        while count := file.readinto(piece):
            found.update(memoryview(piece)[:count])
            size += count
        os.fsync(file.fileno())
    return Shard(name, size, found.hexdigest())


class MeasuredFile:
    """A new file. While it is written, a thread computes its digest. After the ``with`` block, the file is on the disk.

    Args:
        path: path of the file.
        name: the file's name in its checkpoint.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._file = open(path, "wb", buffering=0)
        self._path = path
        self._name = name
        self._size = 0
        self._whole = False
        self._read = 0
        self._more = threading.Condition()
        self._found = hashlib.sha256()
        self._thread = threading.Thread(target=self._follow, name="distributor-digest", daemon=True)

    def __enter__(self) -> MeasuredFile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._more:
            self._whole = True
            self._more.notify()
        self._thread.join()
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    @property
    def shard(self) -> Shard:
        """The file's size and digest, once the file is complete.

        Raises:
            OSError: the file cannot be read.
        """
        if self._read < self._size:  # some network file systems do not let a file be read while it is written
            return measured(self._path, self._name)
        return Shard(self._name, self._size, self._found.hexdigest())

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data`` to the file."""
        left = memoryview(data).cast("B")
        while left:
            left = left[self._file.write(left) :]
        with self._more:
            self._size += memoryview(data).nbytes
            self._more.notify()
        return memoryview(data).nbytes

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""

    def close(self) -> None:
        """Do nothing, because the file is closed at the end of the ``with`` block."""

    def _follow(self) -> None:
        """Read and hash data as it is written to the file, until the file is complete. A thread of its own does this.

        Also advise the kernel to begin to write the data to the disk.
        """
        piece = bytearray(_PIECE)
        with suppress(OSError), open(self._path, "rb", buffering=0) as file:
            while self._waits_for_more() and (count := file.readinto(piece)):
                self._found.update(memoryview(piece)[:count])
                with suppress(OSError):  # some file systems do not support this advice
                    os.posix_fadvise(self._file.fileno(), self._read, count, os.POSIX_FADV_DONTNEED)
                self._read += count

    def _waits_for_more(self) -> bool:
        """Wait until there is more to read, or the file is complete. Return whether there is more to read."""
        with self._more:
            self._more.wait_for(lambda: self._whole or self._size >= self._read + _PIECE)
            return self._size > self._read


def is_intact(path: Path, shard: Shard) -> bool:
    """Return whether a file has the size and digest that its checkpoint's manifest states."""
    try:
        if os.stat(path).st_size != shard.size:
            return False
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == shard.digest
    except OSError:
        return False


def divide(brought: Sequence[Mapping[str, Shard]], what: str) -> list[tuple[Shard, ...]]:
    """Return the files that each rank adds to a checkpoint. If ranks have the same file, only the lowest rank adds it.

    Args:
        brought: the files that each rank has written, by name.
        what: the user's call, which errors quote.

    Raises:
        ConfigurationError: two ranks have different files with the same name, or a file of one rank has the same name
            as a folder of another rank.

    Example:
        >>> one, other = Shard("config.json", 2, "aa"), Shard("1.pt", 9, "bb")
        >>> divide([{"config.json": one}, {"config.json": one, "1.pt": other}], "...")[1]
        (Shard(name='1.pt', size=9, digest='bb'),)
    """
    owners: dict[str, tuple[int, Shard]] = {}
    folders: dict[str, int] = {}
    for rank, files in enumerate(brought):
        for name, shard in files.items():
            owner, first = owners.setdefault(name, (rank, shard))
            if first != shard:
                raise ConfigurationError(
                    f"{what}: {who([owner, rank])} wrote different bytes to {name!r}: give each rank's file a name of "
                    "its own, for example with runtime.rank(), or write the file in one rank only"
                )
            for folder in _folders(name):
                folders.setdefault(folder, rank)
    for name, (owner, _) in owners.items():
        if name in folders:
            raise ConfigurationError(
                f"{what}: {name!r} is a file of rank {owner} and a folder of rank {folders[name]}: rename one of them"
            )
    return [tuple(shard for owner, shard in owners.values() if owner == rank) for rank in range(len(brought))]


def _folders(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name
