"""Packs this package for executors, and takes large parts out of a job so that they can be sent separately."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

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


def detach(job: Job, limit: int) -> tuple[Job, dict[str, bytes]]:
    """Take the parts of more than ``limit`` bytes out of a job, and return them by name, to be sent separately.

    >>> rest, parts = detach(job, 1 << 20)  # doctest: +SKIP
    >>> attach(rest, parts) == job  # doctest: +SKIP
    """
    parts = {}
    if isinstance(job.target, Function) and len(job.target.pickled) > limit:
        parts["function"] = job.target.pickled
        job = replace(job, target=replace(job.target, pickled=b""))
    if job.working_dir is not None and len(job.working_dir.archive or b"") > limit:
        parts["working_dir"] = job.working_dir.archive or b""
        job = replace(job, working_dir=replace(job.working_dir, archive=b""))
    if job.output_dir is not None and len(job.output_dir.archive or b"") > limit:
        parts["output_dir"] = job.output_dir.archive or b""
        job = replace(job, output_dir=replace(job.output_dir, archive=b""))
    return job, parts


def attach(job: Job, parts: Mapping[str, bytes]) -> Job:
    """Put the parts that :func:`detach` took out of a job back into the job."""
    if "function" in parts and isinstance(job.target, Function):
        job = replace(job, target=replace(job.target, pickled=parts["function"]))
    if "working_dir" in parts and job.working_dir is not None:
        job = replace(job, working_dir=replace(job.working_dir, archive=parts["working_dir"]))
    if "output_dir" in parts and job.output_dir is not None:
        job = replace(job, output_dir=replace(job.output_dir, archive=parts["output_dir"]))
    return job
