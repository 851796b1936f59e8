"""Writes and commits snapshots, and finds those that are there."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distributor.data import local_tables, spark_frames
from distributor.data.manifest import DataFile, Field, SnapshotManifest, SourceDigest
from distributor.data.source import Data, as_data, recipe
from distributor.errors import ConfigurationError, ResourceError, RunCancelledError
from distributor.machine.storage import PAUSES, Url, is_url, open_storage
from distributor.shipping import modules
from distributor.text import notices
from distributor.text.wording import count, size
from distributor.values import codec
from distributor.values.dataset import MANIFEST

if TYPE_CHECKING:
    from distributor.data.writer import Recipe

#: What is in the folder of a snapshot before its manifest.
_BEGUN = re.compile(rf"files-[0-9a-f]{{8}}|\.{re.escape(MANIFEST)}\.part")


def snapshot(source: Any, folder: str | os.PathLike[str]) -> Data:
    """Write a DataFrame once, keep it in a folder, and return it as data for any number of runs.

    If the folder has a snapshot already, it is used as it is, unless its source has changed. That can be told of
    Spark's tables in files, by the plan and by the names of the files, and of tables that Spark does not read, by the
    rows; of other sources, and with Python functions, a line says that it cannot be told.

    Args:
        source: a DataFrame, or ``Data`` with one.
        folder: a folder that the driver and all nodes see under this path, or an fsspec URL.

    Raises:
        ConfigurationError: an argument is wrong, the rows have nulls that ``Data`` does not allow, or the folder has
            a snapshot of another source.
        ResourceError: the disk is full.

    Example:
        >>> points = snapshot(Data(df, pack={"x": ["x1", "x2"]}, label="y"), "/shared/points")  # doctest: +SKIP
        >>> Distributor(4, use_gpu=False, data={"train": points}).run(train)  # doctest: +SKIP
    """
    data = as_data(source)
    place = os.fspath(folder)
    place = place if is_url(place) else os.path.abspath(os.path.expanduser(place))
    there, now = find(place), source_of(data)
    if there is None:
        write(data, place, now)
    elif there.source.is_same(now) is False:
        raise ConfigurationError(
            f"the folder {place!r} has a snapshot of another source or of other columns, {described(there)}: remove "
            "the folder, or pass another"
        )
    else:
        notices.inform(f"uses the snapshot in {place}, {described(there, now)}")
    return Data(place, lanes=data.lanes)


def described(manifest: SnapshotManifest, now: SourceDigest | None = None) -> str:
    """Return how many rows a snapshot has, and when it was written; also if its source, ``now``, may have changed."""
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    doubt = now is not None and manifest.source.is_same(now) is None
    text = ": it cannot be told whether its source has changed since" if doubt else ""
    return f"{count(manifest.rows, 'row')} written at {written}{text}"


def find(folder: str) -> SnapshotManifest | None:
    """Return the manifest of the snapshot in a folder; ``None`` if there is none."""
    content = open_storage(folder).read(MANIFEST)
    return None if content is None else codec.read(SnapshotManifest, content)


def is_begun(folder: str) -> bool:
    """Whether a folder has nothing but what a driver has left that was killed while it wrote a snapshot there."""
    names = Url(folder, PAUSES).sizes() if is_url(folder) else os.listdir(folder)
    return all(_BEGUN.fullmatch(name.partition("/")[0]) for name in names)


def source_of(data: Data, wanted: Callable[[], bool] = lambda: True) -> SourceDigest:
    """Return digests of what is asked of the source, and of the source itself, if changes of it can be told.

    Raises:
        ConfigurationError: rows of a table that Spark does not read cannot become fields.
        RunCancelledError: they are no longer ``wanted()``.
    """
    fields = None if data.wanted is None else sorted(data.wanted.items())
    nulls = sorted(data.nulls.items()) if isinstance(data.nulls, Mapping) else data.nulls
    asked = repr((fields, sorted(data.pack), nulls, sorted(data.dtypes.items())))
    plan = spark_frames.plan_of(data.source) if spark_frames.is_frame(data.source) else _rows_of(data, wanted)
    return SourceDigest(hashlib.sha256(asked.encode()).hexdigest()[:16], plan)


def _rows_of(data: Data, wanted: Callable[[], bool]) -> str:
    """Return a digest of the rows of a table that Spark does not read."""
    from distributor.data.writer import RefusedRows, digest

    try:
        return digest(*_local(data, wanted))
    except RefusedRows as error:
        raise ConfigurationError(f"the data cannot be written: {error}") from None


def _local(data: Data, wanted: Callable[[], bool]) -> tuple[Recipe, Iterator[Any]]:
    """Return how rows of a table that Spark does not read become fields, and its batches while they are wanted."""
    from distributor.data.writer import sources_of

    table = local_tables.open_table(data.source)
    made = recipe(data, table.types)

    def batches() -> Iterator[Any]:
        for batch in table.batches(sources_of(made.outputs)):
            if not wanted():
                raise RunCancelledError("the run was cancelled while its data was written")
            yield batch

    return made, batches()


def check(data: Data) -> None:
    """Check everything that can be known before rows are read.

    Raises:
        ConfigurationError: the source has no such column, or one that has no tensor, or a package is missing.
    """
    if (missing := next((each for each in ("pyarrow", "numpy") if modules.find(each) is None), None)) is not None:
        raise ConfigurationError(f"data= needs {missing}, which is not installed: pip install 'distributor[data]'")
    if not is_snapshot(data):
        recipe(data, _types_of(data.source))
    elif data.wanted is not None or data.nulls != "error" or data.dtypes:
        raise ConfigurationError(
            f"Data({data.source!r}) is a snapshot, which has its columns already: give pack=, label=, columns=, nulls= "
            "and dtypes= where it is written"
        )


def is_snapshot(data: Data) -> bool:
    """Whether the source is a folder or URL with a snapshot. ConfigurationError: the URL cannot be used."""
    try:
        return isinstance(data.source, str) and open_storage(data.source).size(MANIFEST) is not None
    except OSError as error:
        raise ConfigurationError(f"Data({data.source!r}) cannot be read: {error}") from error


def _types_of(source: Any) -> dict[str, str]:
    return (
        spark_frames.types_of(source) if spark_frames.is_frame(source) else dict(local_tables.open_table(source).types)
    )


def write(
    data: Data, folder: str, source: SourceDigest | None = None, wanted: Callable[[], bool] = lambda: True
) -> SnapshotManifest:
    """Write a snapshot, and commit it with its manifest, made from what the tasks returned and not from a listing.

    Tasks that Spark repeats leave files, which are removed, as is everything if the snapshot fails.
    Without ``source``, nobody can tell later whether it has changed.
    """
    storage, files = open_storage(folder), f"files-{uuid.uuid4().hex[:8]}"
    is_new = storage.root is not None and not storage.root.exists()
    try:
        try:
            if storage.root is not None:
                (storage.root / files).mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(f"the data cannot be written to {folder!r}: {error}") from None
        manifest = SnapshotManifest(
            *_written(data, os.path.join(folder, files), wanted), source or SourceDigest(), time.time()
        )
        storage.write(MANIFEST, codec.pack(manifest))
        return manifest
    except BaseException:
        with suppress(OSError):  # of a URL, which the error is about
            storage.remove_folder(files)
        if is_new:
            with suppress(OSError):  # another driver writes there too
                os.rmdir(folder)
        raise


def _written(data: Data, files: str, wanted: Callable[[], bool]) -> tuple[tuple[Field, ...], tuple[DataFile, ...]]:
    if spark_frames.is_frame(data.source):
        types = spark_frames.types_of(data.source)
        made = recipe(data, types)
        parts = spark_frames.write(data.source, made, files, types, wanted)
    else:
        from distributor.data.writer import write_part

        made, batches = _local(data, wanted)
        parts = [write_part(files, made, 0, batches)]
    _check_parts(parts, files)
    kept = sorted((part for part in parts if part.file), key=lambda part: part.index)
    there = Url(files, PAUSES).sizes() if is_url(files) else os.listdir(files)
    for name in set(there) - {part.file for part in kept}:
        open_storage(files).remove(name)
    fields = tuple(_with_width(each, kept) for each in made.fields)
    folder = os.path.basename(files)
    return fields, tuple(replace(part, file=f"{folder}/{part.file}") for part in kept)


def _check_parts(parts: Sequence[DataFile], files: str) -> None:
    for part in parts:
        if part.problem:
            kind = ResourceError if part.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigurationError
            raise kind(f"the data cannot be written: {part.problem}")
    nulls: dict[str, int] = {}
    for part in parts:
        for name, number in part.nulls.items():
            nulls[name] = nulls.get(name, 0) + number
    if nulls:
        shown = ", ".join(f"{name!r} ({number})" for name, number in sorted(nulls.items()))
        raise ConfigurationError(
            f'the data has nulls in {shown}: pass Data(..., nulls="drop"), "fill", "mask" or a dict of values'
        )
    if not any(part.file for part in parts):
        raise ConfigurationError("the data has no rows" + (", or nulls in each" if parts else ""))
    storage = open_storage(files)
    for part in parts:
        if part.file and storage.size(part.file) != part.size:
            raise ConfigurationError(
                f"an executor wrote {part.file} ({size(part.size)}) to {files}, but the driver does not see it there: "
                "pass a folder that the driver and all executors see, such as snapshot(df, '/shared/folder')"
            )


def _with_width(field: Field, parts: Sequence[DataFile]) -> Field:
    """Return a field of lists with their length, if all have the same and are not empty."""
    found = {end for part in parts if field.name in part.lengths for end in part.lengths[field.name]}
    return replace(field, width=max(found)) if field.kind == "list" and len(found) == 1 and max(found) else field
