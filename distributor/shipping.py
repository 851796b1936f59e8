"""What travels to executors beside the function: this package itself, and the user's project folder."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from distributor.errors import PayloadError

#: Never part of a shipped project folder.
SKIPPED_DIRS = frozenset(
    {".git", "__pycache__", ".venv", "venv", ".tox", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)

#: Bytes of a project folder's files that are shipped without asking.
DEFAULT_WORKING_DIR_LIMIT = 256 << 20


@cache
def package_zip() -> bytes:
    """This package and cloudpickle as an importable zip: executors need neither installed.

    The driver's cloudpickle goes along since pickles name its functions, and those differ between its versions.
    """
    import cloudpickle

    import distributor

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in (distributor, cloudpickle):
            (root,) = package.__path__
            for path in sorted(Path(root).rglob("*.py")):
                archive.write(path, f"{package.__name__}/{path.relative_to(root)}")
    return buffer.getvalue()


def package_root() -> str:
    """The folder from which this very package can be imported on this machine."""
    import distributor

    (root,) = distributor.__path__
    return str(Path(root).parent)


def pack_folder(folder: Path, limit: int) -> bytes:
    """A project folder as zip bytes, file modes included, without what :data:`SKIPPED_DIRS` names.

    Args:
        folder: an existing folder.
        limit: bytes that its files may have together.

    Raises:
        PayloadError: the files are larger than the limit; names the largest. Or a name is not UTF-8.
    """
    files = list(_files_of(folder))
    sizes = {path: path.stat().st_size for path in files}
    total = sum(sizes.values())
    if total > limit:
        largest = max(files, key=lambda path: sizes[path])
        raise PayloadError(
            f"working_dir {str(folder)!r} holds {_mebibytes(total)}, more than working_dir_limit "
            f"({_mebibytes(limit)}); the largest file is {str(largest.relative_to(folder))!r} "
            f"({_mebibytes(sizes[largest])}). Keep data on shared storage, or raise working_dir_limit (bytes)"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in files:
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


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
