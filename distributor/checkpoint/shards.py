"""The files of a checkpoint: their sizes and checksums, and whose file is taken if several ranks wrote the same one."""

from __future__ import annotations

import errno
import fcntl
import functools
import io
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from distributor.checkpoint.records import MANIFEST, Shard
from distributor.errors import ConfigurationError
from distributor.machine.shared_memory import memory_file
from distributor.text.wording import who
from distributor.values.sealed import DamagedError

_PIECE = 4 << 20  # bytes to read or write at a time, a multiple of every block's size

#: The package's own names in a checkpoint's folder: the manifest, also while it is written, and ranks' own folders.
_TAKEN = re.compile(rf"{re.escape(MANIFEST)}|\.{re.escape(MANIFEST)}\.part|\.rank-\d+")

#: Names of files that NFS keeps until they are closed, because they were removed while they were open.
_REMOVED = re.compile(r"\.nfs[0-9a-f]+")


def found_in(folder: Path) -> dict[str, Shard]:
    """Return the files in a folder by name, flushed to the disk.

    Each symbolic link is first replaced by a copy of the file or folder to which it leads. What is neither, a link to a
    folder around it, and a name that the package uses are a ConfigurationError.
    """
    root = Path(os.path.realpath(folder))
    sources = dict(_files(root, "", (root,)))
    for name in sources:
        _check_name(name)
    for path in [each for each in root.rglob("*") if each.is_symlink()]:
        path.unlink()
    return {name: _taken(root / name, source, name) for name, source in sources.items()}


def _taken(path: Path, source: Path, name: str) -> Shard:
    if path != source:  # the checkpoint must hold the file itself, and not a link to it
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    return measured(path, name)


def _files(folder: Path, start: str, outer: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each file in a folder. All paths, and those of outer folders, are without links."""
    for each in sorted(name for name in os.listdir(folder) if not _REMOVED.fullmatch(name)):
        name, path = f"{start}{each}", Path(os.path.realpath(folder / each))
        if path.is_dir():
            if any(inner.is_relative_to(path) for inner in outer):
                raise ConfigurationError(
                    f"checkpoint_folder: {name!r} is a link to {str(path)!r}, which contains this link, so its files "
                    "would be copied without end: remove the link, or let it lead to another folder"
                )
            yield from _files(path, f"{name}/", (*outer, path))
        elif path.is_file():
            yield name, path
        else:
            os.lstat(folder / each)  # raises an error if the file has vanished
            at = repr(str(path))
            why = f"{at} is neither a file nor a folder" if path.exists() else f"there is no file or folder at {at}"
            raise ConfigurationError(
                f"checkpoint_folder: {name!r} cannot be saved, since {why}: write a file, or remove {name!r} before "
                "the with block ends"
            )


def _check_name(name: str) -> None:
    top = name.partition("/")[0]
    if _TAKEN.fullmatch(top):
        raise ConfigurationError(
            f"checkpoint_folder: distributor itself uses the name {top!r} in the folder of each checkpoint: write "
            f"{name!r} under another name, or into a subfolder"
        )


def measured(path: Path, name: str) -> Shard:
    """Flush a file to the disk, and return its size and checksum."""
    with open(path, "rb") as file:
        size, checksum = _read(file)
        os.fsync(file.fileno())
    return Shard(name, size, checksum)


def _read(file: io.BufferedReader) -> tuple[int, int]:
    """Return a file's size and checksum."""
    size = summed = 0
    piece = memoryview(bytearray(_PIECE))
    while count := file.readinto(piece):  # a whole piece, but for the last
        summed = checksum(piece[:count], summed)
        size += count
    return size, summed


def checksum(piece: memoryview, before: int = 0) -> int:
    """Return the checksum of a file from that of the pieces before: CRC-32, in which sums stand for each whole piece.

    The sums are of 1,024 rows of 1,024 numbers of 32 bits, times :func:`_weights`, modulo 2**32. What has changed in
    one number is always found; of other changes, one in 2**32 is not. That takes a fifth of CRC-32's time.
    """
    return zlib.crc32(_sums(piece) if len(piece) == _PIECE else piece, before)


def _sums(piece: memoryview) -> bytearray:
    import torch  # only here: checkpoint_folder needs it for large files alone

    sums = bytearray(4096)
    rows = torch.frombuffer(piece, dtype=torch.int32).view(1024, 1024)
    torch.mm(_weights(), rows, out=torch.frombuffer(sums, dtype=torch.int32).view(1, 1024))
    return sums


@functools.cache
def _weights() -> Any:
    """Return a weight for each row of a piece. They are odd, so that no change of one number gets lost."""
    import torch

    return torch.tensor([[zlib.crc32(bytes([row >> 8, row & 255])) | 1 for row in range(1024)]]).to(torch.int32)


class MeasuredFile:
    """A new file whose checksum is computed while it is written. After the ``with`` block, the file is on the disk.

    Whole pieces go past the kernel's cache, if the file system allows it: finding memory for the cache takes more time
    from the CPUs than all else here. They go through a file in memory, since O_DIRECT needs aligned memory, and
    pwrite(2) copies without the interpreter's lock.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._size = 0
        self._filled = 0  # bytes of the current piece
        self.error: OSError | None = None  # why data could not be written
        self._checksum = 0
        with ExitStack() as stack:
            self._memory = memory_file("distributor-checkpoint")
            stack.callback(os.close, self._memory)
            os.ftruncate(self._memory, _PIECE)
            self._piece = memoryview(mmap.mmap(self._memory, _PIECE))
            self._file = stack.enter_context(open(path, "wb", buffering=0))
            with suppress(OSError):  # some file systems always use the cache
                fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_DIRECT)
            self._stack = stack.pop_all()

    def __enter__(self) -> MeasuredFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            rest = self._piece[: self._filled]
            self._use_cache()  # O_DIRECT takes whole blocks alone
            self._put(rest)
            os.fsync(self._file.fileno())

    @property
    def shard(self) -> Shard:
        """The file's size and checksum, once the file is complete."""
        return Shard(self._name, self._size, self._checksum)

    def write(self, data: bytes | memoryview) -> int:
        left = memoryview(data).cast("B")
        length = left.nbytes
        while left:
            count = os.pwrite(self._memory, left[: _PIECE - self._filled], self._filled)
            self._filled += count
            left = left[count:]
            if self._filled == _PIECE:
                self._put(self._piece)
                self._filled = 0
        self._size += length
        return length

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: what is not a whole piece is written at the end of the ``with`` block."""

    def close(self) -> None:
        """Do nothing, because the file is closed at the end of the ``with`` block."""

    def _put(self, piece: memoryview) -> None:
        left = piece
        try:
            while left:
                try:
                    left = left[self._file.write(left) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._use_cache():
                        raise
        except OSError as error:
            self.error = error
            raise
        self._checksum = checksum(piece, self._checksum)

    def _use_cache(self) -> bool:
        """Write through the kernel's cache from now on; ``False`` if it is used already."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)


def check(path: Path, shard: Shard) -> None:
    """Raise a DamagedError unless a file has the size and checksum that its manifest states."""
    try:
        with open(path, "rb") as file:
            is_intact = os.fstat(file.fileno()).st_size == shard.size
            is_intact = is_intact and _read(file) == (shard.size, shard.checksum)
    except OSError as error:
        raise OSError(f"{shard.name} cannot be read: {error}") from error
    if not is_intact:
        raise DamagedError(f"{shard.name} has other bytes than were saved")


def divide(brought: Sequence[Mapping[str, Shard]], what: str) -> list[tuple[Shard, ...]]:
    """Return the files that each rank adds to a checkpoint. If ranks have the same file, only the lowest rank adds it.

    Args:
        brought: the files that each rank has written, by name.
        what: the user's call, which errors quote.

    Raises:
        ConfigurationError: two ranks have different files with the same name, or a file of one rank has the same name
            as a folder of another rank.

    Example:
        >>> one, other = Shard("config.json", 2, 1), Shard("1.pt", 9, 2)
        >>> divide([{"config.json": one}, {"config.json": one, "1.pt": other}], "...")[1]
        (Shard(name='1.pt', size=9, checksum=2),)
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
