"""Project folders, packed and unpacked."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from distributor.errors import PayloadError
from distributor.text.wording import size

#: Never part of a shipped project folder.
SKIPPED_DIRS = frozenset(
    {".git", "__pycache__", ".venv", "venv", ".tox", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)


#: Bytes of a project folder's files that are shipped without asking.
DEFAULT_WORKING_DIR_LIMIT = 256 << 20


def pack_folder(folder: Path, limit: int, packed: Callable[[int, int], object] | None = None) -> bytes:
    """A project folder as zip bytes, file modes included, without what :data:`SKIPPED_DIRS` names.

    Args:
        folder: an existing folder.
        limit: bytes that its files may have together.
        packed: is told, before each file, how many bytes of how many have been packed.

    Raises:
        PayloadError: the files are larger than the limit; names the largest. Or a name is not UTF-8.
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
    """The inverse of :func:`pack_folder`; restores the executable bits that ``zipfile`` drops."""
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        for info in packed.infolist():
            path = packed.extract(info, folder)
            mode = (info.external_attr >> 16) & 0o777
            if mode:
                os.chmod(path, mode)


def new_files(archive: bytes, folder: Path) -> list[str]:
    """Files in an unpacked folder that have come since, relative to it; without those that are never shipped.

    Args:
        archive: what was unpacked.
        folder: where.
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
            if real not in seen:  # a link to a folder that is shipped already would never end
                seen.add(real)
                dirs.append(name)
        for name in sorted(names):
            path = Path(root, name)
            if path.is_file() and not name.endswith((".pyc", ".pyo")):
                yield path
