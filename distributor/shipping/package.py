"""Packs this package for executors, and takes large parts out of a job so that they can be sent separately."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO

from distributor.values.job import Function, Job


@cache
def package_zip() -> bytes:
    """Return ``distributor`` and cloudpickle as an importable zip, so that neither need be installed on executors.

    It is the driver's cloudpickle, because pickles name its functions, and these names differ between versions.
    """
    import cloudpickle

    import distributor

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in (distributor, cloudpickle):
            for name, source in _modules_of(files(package), package.__name__):
                archive.writestr(zipfile.ZipInfo(name), source, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _modules_of(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the path in the new zip and the source of each of a package's modules. The package may be in a zip, too."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        inside = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _modules_of(entry, inside)
        elif entry.name.endswith(".py"):
            yield inside, entry.read_bytes()


def package_root() -> str:
    """Return the import path of this package on this machine: a folder, a zip, or a folder in a zip."""
    import distributor

    (root,) = distributor.__path__
    return str(Path(root).parent)


def take_call(job: Job) -> tuple[Job, IO[bytes] | None]:
    """Return a job without its pickled call, and the call; the same job and ``None`` if it has no large call."""
    if not isinstance(job.target, Function) or isinstance(job.target.pickled, bytes):
        return job, None
    return replace(job, target=replace(job.target, pickled=b"")), job.target.pickled


def call_size(job: Job) -> int:
    """Return the bytes of a job's pickled call if it is large, otherwise 0."""
    _, call = take_call(job)
    return 0 if call is None else os.fstat(call.fileno()).st_size


#: The parts of a job that may be large: the field of the job, and the part's name in it.
_PARTS = {
    "working_dir": ("working_dir", "archive"),
    "output_dir": ("output_dir", "archive"),
}


def detach(job: Job, limit: int) -> tuple[Job, dict[str, bytes]]:
    """Take the parts of more than ``limit`` bytes out of a job, and return them by name, to be sent separately.

    >>> rest, parts = detach(job, 1 << 20)  # doctest: +SKIP
    >>> attach(rest, parts) == job  # doctest: +SKIP
    """
    parts = {part: getattr(getattr(job, field), name, None) or b"" for part, (field, name) in _PARTS.items()}
    parts = {part: content for part, content in parts.items() if len(content) > limit}
    return attach(job, dict.fromkeys(parts, b"")), parts


def attach(job: Job, parts: Mapping[str, bytes]) -> Job:
    """Put the parts that :func:`detach` took out of a job back into the job."""
    for part, content in parts.items():
        field, name = _PARTS[part]
        job = replace(job, **{field: replace(getattr(job, field), **{name: content})})
    return job
