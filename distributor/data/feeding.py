"""Runs on the driver: brings the data of a run to where ranks read them, and removes what nothing needs any more."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from distributor.checkpoint.catalog import Catalog
from distributor.data import snapshots
from distributor.data.manifest import SnapshotManifest, SourceDigest
from distributor.data.source import Data
from distributor.errors import ConfigurationError
from distributor.machine import folders
from distributor.machine.storage import Storage, is_url, open_storage
from distributor.text import notices
from distributor.text.wording import duration, size
from distributor.values.checkpoints import Checkpoints
from distributor.values.dataset import MANIFEST, Dataset
from distributor.values.job import Job

#: Begins the names of snapshots' folders beside checkpoints.
_PREFIX = "data-"


def check(data: Mapping[str, Data], checkpoints: Checkpoints | None, *, one_machine: bool) -> None:
    """Check the data of a run, and that there is a place for it that all nodes see.

    Raises:
        ConfigurationError: see :func:`distributor.data.snapshots.check`, or there is no such place.
    """
    for name, each in data.items():
        try:
            snapshots.check(each)
        except ConfigurationError as error:
            raise ConfigurationError(f"data {name!r}: {error}") from None
        if not (snapshots.is_snapshot(each) or one_machine or checkpoints is not None):
            raise ConfigurationError(
                f"data {name!r} needs a folder or URL that the driver and all executors see: write it there once, "
                f"data={{{name!r}: snapshot(df, '/shared/{name}')}}, or pass checkpoints= with such a folder"
            )


@contextmanager
def feed(job: Job, data: Mapping[str, Data], wanted: Callable[[], bool]) -> Iterator[Job]:
    """Write the snapshots of a run unless they are there, and yield the job with their places. Remove them afterwards.

    Beside checkpoints, a snapshot is kept as long as one of these may refer to it.
    """
    with ExitStack() as kept:
        places, beside = {}, list[str]()
        if job.checkpoints is not None:
            kept.callback(_remove_unneeded, job, job.checkpoints, beside)
        for name, each in data.items():
            if snapshots.is_snapshot(each):
                folder = each.source if is_url(each.source) else os.path.abspath(each.source)
                manifest = snapshots.find(folder)
            elif job.checkpoints is not None:
                folder, manifest = _kept(job, name, each, job.checkpoints, wanted)
                beside.append(folder)
            else:
                folder, manifest = kept.enter_context(_temporary(job, name, each, wanted))
            places[name] = Dataset(folder, each.lanes, manifest.id if manifest is not None else "")
        yield replace(job, data=places)


def _write(
    job: Job, name: str, data: Data, folder: str, source: SourceDigest | None, wanted: Callable[[], bool]
) -> SnapshotManifest:
    began = time.monotonic()
    try:
        manifest = snapshots.write(data, folder, source, wanted)
    except ConfigurationError as error:
        raise ConfigurationError(f"data {name!r}: {error}") from None
    took = duration(time.monotonic() - began)
    whole = sum(part.size for part in manifest.parts)
    notices.inform(f"run {job.label}: data {name!r}: {manifest.rows:,} rows ({size(whole)}) written in {took}")
    return manifest


@contextmanager
def _temporary(job: Job, name: str, data: Data, wanted: Callable[[], bool]) -> Iterator[tuple[str, SnapshotManifest]]:
    private = folders.make(job.run_id)
    try:
        with folders.claim(private):
            folder = os.path.join(private, name)
            yield folder, _write(job, name, data, folder, None, wanted)
    finally:
        folders.remove(private)


def _kept(
    job: Job, name: str, data: Data, checkpoints: Checkpoints, wanted: Callable[[], bool]
) -> tuple[str, SnapshotManifest]:
    """Return the snapshot beside the checkpoints, which is written unless it is there."""
    beside = open_storage(checkpoints.dir)
    there, others = _snapshots(beside, checkpoints.dir, name)
    if job.fence is not None:  # otherwise, another run may be writing there
        for folder in filter(snapshots.is_begun, others):
            _remove(beside, folder)
    try:
        saved: list[float] | None = _saved(checkpoints)
    except OSError:  # a checkpoint that cannot be read now may refer to each of them
        saved = None
    try:
        source = snapshots.source_of(data, wanted)
    except ConfigurationError as error:
        raise ConfigurationError(f"data {name!r}: {error}") from None
    folder, newest = there[-1] if there else ("", None)
    same = newest is not None and newest.source.is_same(source)
    if newest is not None and (same or (same is None and saved != [])):
        text = f"continues with the snapshot in {folder}, {snapshots.described(newest, source)}"
        notices.inform(f"run {job.label}: data {name!r}: {text}")
    else:
        folder = os.path.join(checkpoints.dir, f"{_PREFIX}{name}-{secrets.token_hex(4)}")
        there.append((folder, _write(job, name, data, folder, source, wanted)))
    if saved is not None:
        _remove_old(beside, there, saved)
    return there[-1]


def _remove_unneeded(job: Job, checkpoints: Checkpoints, folders: Sequence[str]) -> None:
    """Remove a run's snapshots beside its checkpoints at its end, unless one of these may refer to them."""
    try:
        needed = not folders or _saved(checkpoints)
    except OSError as error:  # the run has ended as it has
        text = "the next run there removes it unless a checkpoint needs it"
        notices.logger.warning("run %s: its data stays in %s: %s; %s", job.label, ", ".join(folders), error, text)
        return
    if not needed:
        for folder in folders:
            _remove(open_storage(checkpoints.dir), folder)


def _saved(checkpoints: Checkpoints) -> list[float]:
    """Return when the checkpoints that are there were committed. OSError: one may be there that cannot be read."""
    return [each.time for each in Catalog(open_storage(checkpoints.dir), checkpoints).all_committed()]


def _snapshots(beside: Storage, where: str, name: str) -> tuple[list[tuple[str, SnapshotManifest]], list[str]]:
    """Return the snapshots of this name, the oldest first, and other folders with such names."""
    found, others = list[tuple[str, SnapshotManifest]](), list[str]()
    for folder in beside.folders():
        if re.fullmatch(f"{_PREFIX}{re.escape(name)}-[0-9a-f]{{8}}", folder):
            path = os.path.join(where, folder)
            if (manifest := snapshots.find(path)) is None:
                others.append(path)
            else:
                found.append((path, manifest))
    return sorted(found, key=lambda each: each[1].created), others


def _remove_old(beside: Storage, there: Sequence[tuple[str, SnapshotManifest]], saved: Sequence[float]) -> None:
    """Remove snapshots from whose time no checkpoint is left. A checkpoint refers to the newest one before it."""
    for (folder, manifest), (_, later) in itertools.pairwise(there):
        if not any(manifest.created <= moment < later.created for moment in saved):
            _remove(beside, folder)


def _remove(beside: Storage, folder: str) -> None:
    name = os.path.basename(folder)
    with suppress(OSError):  # of a URL: the next run tries again
        beside.remove(f"{name}/{MANIFEST}")  # first: nothing continues with what is left if this is interrupted
        beside.remove_folder(name)
