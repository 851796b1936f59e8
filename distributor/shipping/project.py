"""Pack and unpack project folders."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from distributor.errors import PayloadError
from distributor.text.wording import size

#: Names of folders that are never part of a shipped project folder.
SKIPPED_DIRS = frozenset(
    {".git", "__pycache__", ".venv", "venv", ".tox", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)


#: The default limit on the size of a project folder's files together, in bytes.
DEFAULT_WORKING_DIR_LIMIT = 256 << 20


def pack_folder(folder: Path, limit: int, packed: Callable[[int, int], object] | None = None) -> bytes:
    """Return the files of a project folder as zip bytes, with their modes.

    Folders in :data:`SKIPPED_DIRS` and compiled Python files (``.pyc``, ``.pyo``) are left out.

    Args:
        folder: an existing folder.
        limit: the largest number of bytes that the files may have together.
        packed: called before each file with the number of bytes packed so far and the number of all bytes.

    Raises:
        PayloadError: the files are larger than the limit (the text names the largest), or a file name is not UTF-8.
    """
    files = list(_files_of(folder))
    sizes = {path: path.stat().st_size for path in files}
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
                archive.write(path, path.relative_to(folder))
            except UnicodeEncodeError:
                raise PayloadError(
                    f"working_dir {str(folder)!r} holds a file whose name is not UTF-8: {path.name!r}; rename it"
                ) from None
    return buffer.getvalue()


def unpack_folder(archive: bytes, folder: Path) -> None:
    """Unpack what :func:`pack_folder` packed; also restore the file modes, which ``zipfile`` drops."""
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        for info in packed.infolist():
            path = packed.extract(info, folder)
            mode = (info.external_attr >> 16) & 0o777
            if mode:
                os.chmod(path, mode)


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
    seen = {os.path.realpath(folder)}
    for root, dirs, names in os.walk(folder, followlinks=True):
        wanted = sorted(name for name in dirs if name not in SKIPPED_DIRS)
        dirs[:] = []
        for name in wanted:
            real = os.path.realpath(os.path.join(root, name))
            if real not in seen:  # skips links to folders that are included already: following them may never end
                seen.add(real)
                dirs.append(name)
        for name in sorted(names):
            path = Path(root, name)
            if path.is_file() and not name.endswith((".pyc", ".pyo")):
                yield path
