"""Packs and unpacks project folders."""

from __future__ import annotations

import io
import os
import stat
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from distributor.errors import ConfigurationError, PayloadError
from distributor.text.wording import size
from distributor.values.files import make_way
from distributor.values.layout import OWNER, PREFIX

# Names of folders that are never shipped.
SKIPPED_DIRS = frozenset(
    {".git", "__pycache__", ".venv", ".venvs", "venv", ".tox", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)


_UNIX = 3  # ``create_system`` of a zip entry whose attributes are Unix's


def is_skipped(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is never shipped: one of :data:`SKIPPED_DIRS`, or the private folder of a process."""
    name = os.path.basename(folder)
    return name in SKIPPED_DIRS or (name.startswith(PREFIX) and os.path.isfile(os.path.join(folder, OWNER)))


def temporary(top: str) -> list[str]:
    """Return the real path of the temporary directory if it is inside ``top``, which is a real path."""
    folder = os.path.realpath(tempfile.gettempdir())
    return [folder] if folder.startswith(top + os.sep) else []


def current_folder() -> Path:
    """Return the current directory; ConfigurationError if it no longer exists."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigurationError("the driver's current directory no longer exists: change to another") from None


def absolute(path: Path) -> Path:
    """Return an absolute path. A relative path is relative to the current directory."""
    return path if path.is_absolute() else current_folder() / path


def pack_folder(
    folder: Path, limit: int, packed: Callable[[int, int], object] | None = None, apart: Iterable[Path] = ()
) -> bytes:
    """Return the files and empty folders of a project folder as zip bytes, with the files' modes.

    Folders of :func:`is_skipped`, the temporary directory, folders that this user cannot list, the real paths
    ``apart``, and compiled Python files are left out, and so are links to a folder that contains the link. Any other
    link to a folder of the project stays a link. The remaining links are followed. Files that vanish meanwhile are left
    out.
    ``packed`` gets the numbers of bytes so far and in all.

    PayloadError if there are more than ``limit`` bytes, or a name is not UTF-8; OSError if a file cannot be read.
    """
    out = {*map(Path, temporary(os.path.realpath(folder))), *apart}
    shipped = _files_below(folder, os.path.realpath(folder), frozenset())
    sizes = _sizes_of(path for path in shipped if out.isdisjoint(Path(os.path.realpath(path)).parents))
    total = sum(sizes.values())
    if total > limit:
        largest = max(sizes, key=lambda path: sizes[path])
        raise PayloadError(
            f"working_dir {str(folder)!r} holds {size(total)}, more than working_dir_limit "
            f"({size(limit)}); the largest file is {str(largest.relative_to(folder))!r} "
            f"({size(sizes[largest])}). Keep data on shared storage, or raise working_dir_limit"
        )
    return pack_files(folder, sizes, packed)


def pack_files(folder: Path, files: Iterable[Path], packed: Callable[[int, int], object] | None = None) -> bytes:
    """Return files of a folder that still exist as zip bytes, with their modes. Links to folders in it stay links."""
    sizes = _sizes_of(files)
    buffer, done, total = io.BytesIO(), 0, sum(sizes.values())
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path, held in sizes.items():
            if packed is not None:
                packed(done, total)
            done += held
            try:
                if path.is_symlink() and path.is_dir():
                    archive.writestr(*_link(path, folder))
                else:
                    archive.write(path, path.relative_to(folder))
            except FileNotFoundError:  # just removed
                continue
            except UnicodeEncodeError:
                raise PayloadError(
                    f"the folder {str(folder)!r} holds a file whose name is not UTF-8: {path.name!r}; rename it"
                ) from None
    return buffer.getvalue()


def _sizes_of(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the sizes of the files that still exist, with 0 for folders."""
    sizes = {}
    for path in paths:
        with suppress(FileNotFoundError):
            sizes[path] = 0 if path.is_dir() else path.stat().st_size
    return sizes


def unpack_folder(archive: bytes, folder: Path, *, keep: bool = False) -> None:
    """Unpack files with their modes, times and links, which ``zipfile`` does not restore.

    Existing files and links are replaced, or kept if ``keep``. A link is never followed.
    """
    folder.mkdir(parents=True, exist_ok=True)  # an archive without files creates no folder
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        for info in packed.infolist():
            mode, target = info.external_attr >> 16, folder / info.filename
            if keep and os.path.lexists(target):
                continue
            if info.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            make_way(str(folder), info.filename)
            if stat.S_ISLNK(mode):
                target.symlink_to(packed.read(info).decode())
                continue
            path = packed.extract(info, folder)
            changed = time.mktime((*info.date_time, 0, 0, -1))
            os.utime(path, (changed, changed))
            if mode & 0o777:
                os.chmod(path, mode & 0o777)


def _files_below(folder: Path, top: str, around: frozenset[str]) -> Iterator[Path]:
    """Yield what is shipped: files, empty folders, and links to other shipped folders of the project ``top``."""
    try:
        entries = [folder / name for name in sorted(os.listdir(folder))]
    except OSError:  # not readable by this user
        return
    if around and not entries:
        yield folder
    around |= {os.path.realpath(folder)}
    yield from (path for path in entries if path.is_file() and path.suffix not in (".pyc", ".pyo"))
    for path in entries:
        if not path.is_dir() or is_skipped(path):
            continue
        real = os.path.realpath(path)
        if real in around:  # a link to a parent folder: following it would never end
            continue
        if path.is_symlink() and _is_shipped(real, top):
            yield path
        else:
            yield from _files_below(path, top, around)


def _is_shipped(folder: str, top: str) -> bool:
    """Return whether a folder is in the project folder ``top``, and not in one of :data:`SKIPPED_DIRS`."""
    parts = os.path.relpath(folder, top).split(os.sep)
    return os.pardir not in parts and SKIPPED_DIRS.isdisjoint(parts)


def _link(path: Path, folder: Path) -> tuple[zipfile.ZipInfo, str]:
    """Return the zip entry of a link to a folder of the project, and the link's target relative to the link."""
    inside = path.relative_to(folder)
    info = zipfile.ZipInfo(inside.as_posix())
    info.create_system, info.external_attr = _UNIX, (stat.S_IFLNK | 0o777) << 16
    target = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return info, os.path.relpath(target, inside.parent)
