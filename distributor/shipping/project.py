"""Pack and unpack project folders."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from distributor.errors import ConfigurationError, PayloadError
from distributor.text.wording import size

#: Names of folders that are never part of a shipped project folder.
SKIPPED_DIRS = frozenset(
    {".git", "__pycache__", ".venv", "venv", ".tox", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)


#: Says in a zip entry that its attributes are those of Unix.
_UNIX = 3


def current_folder() -> Path:
    """Return the current directory.

    Raises:
        ConfigurationError: the current directory does not exist.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigurationError("the driver's current directory no longer exists: change to another") from None


def absolute(path: Path) -> Path:
    """Return a path with the current directory in front, if it is relative.

    Raises:
        ConfigurationError: the path is relative, and the current directory does not exist.
    """
    return path if path.is_absolute() else current_folder() / path


def pack_folder(folder: Path, limit: int, packed: Callable[[int, int], object] | None = None) -> bytes:
    """Return the files of a project folder as zip bytes, with their modes.

    Folders in :data:`SKIPPED_DIRS` and compiled Python files (``.pyc``, ``.pyo``) are left out. A link to a folder of
    the project stays a link; other links are followed.

    Args:
        folder: an existing folder.
        limit: the largest number of bytes that the files may have together.
        packed: called before each file with the number of bytes packed so far and the number of all bytes.

    Raises:
        PayloadError: the files are larger than the limit (the text names the largest), or a file name is not UTF-8.
    """
    files = list(_files_of(folder))
    sizes = {path: 0 if path.is_dir() else path.stat().st_size for path in files}
    total = sum(sizes.values())
    if total > limit:
        largest = max(files, key=lambda path: sizes[path])
        raise PayloadError(
            f"working_dir {str(folder)!r} holds {size(total)}, more than working_dir_limit "
            f"({size(limit)}); the largest file is {str(largest.relative_to(folder))!r} "
            f"({size(sizes[largest])}). Keep data on shared storage, or raise working_dir_limit (bytes)"
        )
    buffer, done = io.BytesIO(), 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in files:
            if packed is not None:
                packed(done, total)
            done += sizes[path]
            try:
                if path.is_dir():
                    archive.writestr(*_link(path, folder))
                else:
                    archive.write(path, path.relative_to(folder))
            except UnicodeEncodeError:
                raise PayloadError(
                    f"working_dir {str(folder)!r} holds a file whose name is not UTF-8: {path.name!r}; rename it"
                ) from None
    return buffer.getvalue()


def unpack_folder(archive: bytes, folder: Path) -> None:
    """Unpack what :func:`pack_folder` packed; also restore file modes and links, which ``zipfile`` drops."""
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        for info in packed.infolist():
            mode = info.external_attr >> 16
            if stat.S_ISLNK(mode):
                link = folder / info.filename
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(packed.read(info).decode())
                continue
            path = packed.extract(info, folder)
            if mode & 0o777:
                os.chmod(path, mode & 0o777)


def new_files(archive: bytes, folder: Path) -> list[str]:
    """Return the files in an unpacked folder that were added since, without those that are never shipped.

    Args:
        archive: the zip bytes that were unpacked.
        folder: the folder that they were unpacked into; the returned names are relative to it.
    """
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        known = set(packed.namelist())
    return [name for path in _files_of(folder) if (name := path.relative_to(folder).as_posix()) not in known]


def _files_of(folder: Path) -> Iterator[Path]:
    """Yield what is shipped of a project folder: files, and links to folders that are shipped themselves."""
    return _files_below(folder, os.path.realpath(folder), frozenset())


def _files_below(folder: Path, top: str, around: frozenset[str]) -> Iterator[Path]:
    around |= {os.path.realpath(folder)}
    try:
        entries = [folder / name for name in sorted(os.listdir(folder))]
    except OSError:  # not readable by this user
        return
    yield from (path for path in entries if path.is_file() and path.suffix not in (".pyc", ".pyo"))
    for path in entries:
        if not path.is_dir() or path.name in SKIPPED_DIRS:
            continue
        real = os.path.realpath(path)
        if real in around:  # a link to a folder around it: following it would never end
            continue
        if path.is_symlink() and _is_shipped(real, top):
            yield path
        else:
            yield from _files_below(path, top, around)


def _is_shipped(folder: str, top: str) -> bool:
    """Return whether a folder lies in the project folder ``top``, and in nothing that is left out of it."""
    parts = os.path.relpath(folder, top).split(os.sep)
    return os.pardir not in parts and SKIPPED_DIRS.isdisjoint(parts)


def _link(path: Path, folder: Path) -> tuple[zipfile.ZipInfo, str]:
    """Return the zip entry of a link to a folder of the project, and where it leads from its own folder."""
    inside = path.relative_to(folder)
    info = zipfile.ZipInfo(inside.as_posix())
    info.create_system, info.external_attr = _UNIX, (stat.S_IFLNK | 0o777) << 16
    target = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return info, os.path.relpath(target, inside.parent)
