"""Write rows as Arrow files: runs in a Spark task, where it arrives by value, or on the driver.

It needs pyarrow and NumPy. Each file is an Arrow IPC file without nulls. Its first column has the numbers of a row,
as they go into tensors (`row_layout`).
"""

import hashlib
import os
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from distributor.data.arrays import to_arrow, to_numpy
from distributor.data.manifest import DataFile, Field, Kind
from distributor.data.row_layout import row_type, stored
from distributor.machine.storage import is_url, open_storage

BLOCK_BYTES = 2 << 20

Packs = Sequence[tuple[str, ...]]  # columns of one type that Spark sends as an array, under the first one's name


@dataclass(frozen=True)
class FieldRecipe:
    """One field, and how it is made from columns of the source."""

    name: str
    sources: tuple[str, ...]
    kind: Kind
    dtype: str = ""
    is_packed: bool = False  # the columns, maybe only one, stand side by side in each row

    @property
    def field(self) -> Field:
        return Field(self.name, self.kind, self.dtype, len(self.sources) if self.is_packed else None)


@dataclass(frozen=True)
class Recipe:
    """How rows become fields."""

    outputs: tuple[FieldRecipe, ...]
    nulls: Literal["error", "drop", "fill", "mask"] = "error"
    fills: tuple[tuple[str, Any], ...] = ()  # values by column, with nulls="error" for other columns

    @property
    def fields(self) -> tuple[Field, ...]:
        masks = (mask_of(each) for each in self.outputs if self.nulls == "mask")
        return (*(each.field for each in self.outputs), *masks)


def sources_of(outputs: Iterable[FieldRecipe]) -> list[str]:
    """Return the columns of the source that fields are made from, each once."""
    return list(dict.fromkeys(name for output in outputs for name in output.sources))


class RefusedRows(Exception):  # noqa: N818
    """Rows that cannot become fields, in words."""


def mask_of(output: FieldRecipe) -> Field:
    """Return the field that says which values of another were not null."""
    kind: Kind = "list" if output.kind == "list" else "number"
    return Field(f"{output.name}_mask", kind, "bool", output.field.width)


def write_part(folder: str, recipe: Recipe, index: int, batches: Iterable[pa.RecordBatch]) -> DataFile:
    """Write one file, unless there are no rows, or nulls or values that must not be; then say so."""
    place = path = os.path.join(tempfile.gettempdir() if is_url(folder) else folder, f"{uuid.uuid4().hex}.arrow")
    written = DataFile(index)
    try:
        written = _write(path, recipe, index, batches)
        if written.file and is_url(folder):
            place = folder
            open_storage(folder).put(path, written.file)
    except RefusedRows as error:
        written = DataFile(index, problem=str(error))
    except OSError as error:
        problem = f"{os.strerror(error.errno) if error.errno else error} (while it wrote {place})"
        written = DataFile(index, problem=problem, errno=error.errno or 0)
    finally:
        if is_url(folder) or not written.file:
            with suppress(FileNotFoundError):
                os.remove(path)
    return written


def digest(recipe: Recipe, batches: Iterable[pa.RecordBatch]) -> str:
    """Return a digest of the rows, however they are cut into batches. RefusedRows: they cannot become fields."""
    nulls: dict[str, int] = {}
    found: dict[tuple[str, int], Any] = {}
    for batch in _converted(recipe, batches, nulls):
        for name, column in zip(batch.schema.names, batch.columns):
            for part, content in enumerate(_contents(column)):
                found.setdefault((name, part), hashlib.sha256()).update(content)
    shown = [(key, each.hexdigest()) for key, each in sorted(found.items())], sorted(nulls.items())
    return hashlib.sha256(repr(shown).encode()).hexdigest()


def _contents(column: pa.Array) -> list[Any]:
    """Return a column's values as bytes, and their lengths if these may differ."""
    if pa.types.is_list(column.type):
        return [column.flatten().to_numpy(zero_copy_only=False), column.value_lengths().to_numpy()]
    _, values, *others = column.buffers()
    if not others:
        return [values]
    offsets = np.frombuffer(values, "int32")[column.offset : column.offset + len(column) + 1]
    return [memoryview(others[0] or b"")[offsets[0] : offsets[-1]], np.diff(offsets)]


def _write(path: str, recipe: Recipe, index: int, batches: Iterable[pa.RecordBatch]) -> DataFile:
    rows = 0
    nulls: dict[str, int] = {}
    with pa.OSFile(path, "wb") as sink:
        writer: Any = None
        for block in _blocks(_converted(recipe, batches, nulls)):
            writer = pa.ipc.new_file(sink, block.schema) if writer is None else writer
            writer.write_batch(block)
            rows += block.num_rows
        if writer is not None:
            writer.close()
    if not rows or nulls:
        return DataFile(index, nulls=nulls)
    _sync(path)
    return _described(path, index)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _described(path: str, index: int) -> DataFile:
    """Return what readers need to know of a file."""
    with pa.memory_map(path) as mapped:
        whole = mapped.read_buffer()
        reader = pa.ipc.open_file(pa.BufferReader(whole))
        rows, places, checksums = [], [], []
        lengths: dict[str, tuple[int, int]] = {}
        for number in range(reader.num_record_batches):
            block = reader.get_batch(number)
            found, begins = [], []
            for name, column in zip(block.schema.names, block.columns):
                for buffer in _buffers(column):
                    is_there = buffer is not None and buffer.size > 0  # an empty one may be anywhere
                    begins.append(buffer.address - whole.address if is_there else 0)
                    found += [(begins[-1], begins[-1] + buffer.size)] if is_there else []
                if pa.types.is_list(column.type):
                    here = to_numpy(column.value_lengths())
                    least, most = lengths.get(name, (here[0], here[0]))
                    lengths[name] = int(min(least, here.min())), int(max(most, here.max()))
            begin, end = min((first for first, _ in found), default=0), max((last for _, last in found), default=0)
            rows.append(block.num_rows)
            places += [begin, end, *begins]
            checksums.append(zlib.crc32(memoryview(whole)[begin:end]))
        return DataFile(
            index, os.path.basename(path), whole.size, tuple(rows), tuple(places), tuple(checksums), lengths
        )


def _buffers(column: pa.Array) -> list[Any]:
    """Return a column's buffers that hold offsets, if it has any, and values."""
    buffers = column.buffers()
    return [buffers[1], buffers[-1]] if len(buffers) > 2 else [buffers[1]]


def _blocks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Cut and join batches to blocks of about the same size."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if size < BLOCK_BYTES:
            continue
        whole, most = _joined(waiting), max(1, rows * BLOCK_BYTES // size)
        last = rows // most * most
        for begin in range(0, last, most):
            yield whole.slice(begin, most)
        rows -= last
        waiting = [whole.slice(last)] if rows else []
        size = sum(each.nbytes for each in waiting)
    if rows:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(batches) if len(batches) > 1 else batches[0]


def unpacked(batch: pa.RecordBatch, packs: Packs) -> pa.RecordBatch:
    """Return a batch with columns in place of the arrays as which Spark has sent them."""
    columns = dict(zip(batch.schema.names, batch.columns))
    for pack in packs:
        values = columns[pack[0]].flatten()
        for index, name in enumerate(pack):
            columns[name] = values.take(to_arrow(np.arange(index, len(values), len(pack))))
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _converted(recipe: Recipe, batches: Iterable[pa.RecordBatch], nulls: dict[str, int]) -> Iterator[pa.RecordBatch]:
    """Return batches of fields. Count nulls that are errors: from the first on, nothing more is returned."""
    fills = dict(recipe.fills)
    fields = recipe.fields
    sources = sources_of(recipe.outputs)
    for batch in batches:
        columns = {name: short(batch.column(name)) for name in sources}
        if recipe.nulls == "drop":
            columns = _dropped(columns, batch.num_rows)
        for name, column in columns.items():
            if name in fills:
                columns[name] = _filled(name, column, fills[name])
            elif recipe.nulls == "error" and (count := _null_count(column)):
                nulls[name] = nulls.get(name, 0) + count
        count = len(next(iter(columns.values())))
        if nulls or not count:
            continue
        values: list[Any] = []
        masks: list[Any] = []
        for output in recipe.outputs:
            parts = [columns[name] for name in output.sources]
            if recipe.nulls == "mask":
                masks.append(_mask(output, parts))
            if recipe.nulls in ("fill", "mask"):
                parts = [_filled(name, part, None) for name, part in zip(output.sources, parts)]
            values.append(made(output, parts))
        yield _block(fields, [*values, *masks], count)


def _block(fields: tuple[Field, ...], values: list[Any], count: int) -> pa.RecordBatch:
    """Return rows as they are written: the numbers of all fields in one column, then each other field."""
    kind = row_type(fields)
    names, columns = [], []
    if kind.names:
        rows: Any = np.zeros(count, kind)
        for position in map(int, kind.names):
            target = rows[str(position)].reshape(count, -1)
            for column, numbers in enumerate(values[position]):
                target[:, column] = numbers
        names.append("")
        columns.append(pa.Array.from_buffers(pa.binary(kind.itemsize), count, [None, pa.py_buffer(rows)]))
    others = [position for position, field in enumerate(fields) if field.kind != "number"]
    return pa.record_batch(
        [*columns, *(values[position] for position in others)],
        names=[*names, *(fields[position].name for position in others)],
    )


def short(column: pa.Array) -> pa.Array:
    """Return a column with offsets of 32 bits."""
    if pa.types.is_large_list(column.type):
        return column.cast(pa.list_(column.type.value_type))
    if pa.types.is_fixed_size_list(column.type):
        return column.cast(pa.list_(column.type.value_type))
    if pa.types.is_dictionary(column.type):
        return short(column.dictionary_decode())
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        return column.cast(pa.string())
    return column.cast(pa.binary()) if pa.types.is_large_binary(column.type) else column


def _null_count(column: pa.Array) -> int:
    inside = column.flatten().null_count if pa.types.is_list(column.type) else 0
    return int(column.null_count + inside)


def _dropped(columns: Mapping[str, pa.Array], rows: int) -> dict[str, pa.Array]:
    """Return the rows in which no column has a null."""
    keep: Any = np.ones(rows, bool)
    for column in columns.values():
        keep &= ~has_null(column)
    if keep.all():
        return dict(columns)
    chosen = to_arrow(keep)
    return {name: column.filter(chosen) for name, column in columns.items()}


def has_null(column: pa.Array) -> Any:
    """Return for each row whether it is null, or a list with a null."""
    found: Any = np.zeros(len(column), bool)
    if column.null_count:
        found |= to_numpy(column.is_null().cast(pa.uint8())).view(bool)
    if pa.types.is_list(column.type):
        inside = has_null(short(column.flatten()))
        if inside.any():
            rows: Any = np.repeat(np.arange(len(column)), _lengths(column))
            found[rows[inside]] = True
    return found


def _lengths(column: pa.Array) -> Any:
    """Return the number of values of each list; a list that is null has none."""
    return to_numpy(column.value_lengths().fill_null(0))


def _lists_as(column: pa.Array, values: pa.Array) -> pa.Array:
    """Return lists of these values, each as long as the column's."""
    offsets = np.concatenate([[0], np.cumsum(_lengths(column))]).astype(np.int32)
    return pa.ListArray.from_arrays(to_arrow(offsets), values)


def _filled(name: str, column: pa.Array, value: Any) -> pa.Array:
    """Replace nulls by a value; ``None`` is zero or an empty text. A list that is null has no length to fill."""
    if pa.types.is_list(column.type):
        if column.null_count:
            raise RefusedRows(
                f"column {name!r} has {column.null_count} lists that are null, which cannot be filled: use nulls='drop'"
            )
        values = column.flatten()
        if not values.null_count:
            return column
        return _lists_as(column, _filled(name, values, value))
    if not column.null_count:
        return column
    if value is None:
        value = "" if pa.types.is_string(column.type) else b"" if pa.types.is_binary(column.type) else 0
    if pa.types.is_decimal(column.type):
        with suppress(pa.ArrowInvalid):  # a value with more digits: then all become floats
            return column.fill_null(pa.scalar(Decimal(value), column.type))
    column = _plain(column)
    return column.fill_null(pa.scalar(value, column.type))


def _mask(output: FieldRecipe, parts: list[pa.Array]) -> Any:
    if output.kind == "list":
        (column,) = parts
        return _lists_as(column, column.flatten().is_valid().cast(pa.uint8()))
    return [to_numpy(part.is_valid().cast(pa.uint8())) for part in parts]


def _plain(column: pa.Array) -> pa.Array:
    """Return times as whole numbers, decimals as floats and booleans as bytes."""
    kind = column.type
    if pa.types.is_decimal(kind):
        return column.cast(pa.float64())
    if pa.types.is_date(kind):
        return column.cast(pa.date32()).cast(pa.int32())
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64())
    return column.cast(pa.uint8()) if pa.types.is_boolean(kind) else column


def _numbers(name: str, column: pa.Array, dtype: str) -> Any:
    wanted = stored(dtype)
    if wanted.kind in "iu" and pa.types.is_decimal(column.type):
        column = _whole_numbers(name, column, dtype)
    values = to_numpy(_plain(column))
    wrong: Any = np.zeros(0, bool)
    with np.errstate(all="ignore"):
        made = values.astype(wanted, copy=False)
        if made is not values:
            wrong = made != values if wanted.kind in "iu" else np.isinf(made) & np.isfinite(values)
        wrong = made > 1 if dtype == "bool" and not wrong.any() else wrong
        if wrong.any():
            raise RefusedRows(_misfit(name, values[wrong][0], dtype))
    return made


def _whole_numbers(name: str, column: pa.Array, dtype: str) -> pa.Array:
    """Return decimals as whole numbers: a float would round large ones."""
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        wrong = next(each for each in column.to_pylist() if int(each) != each or not -(1 << 63) <= each < 1 << 63)
        raise RefusedRows(_misfit(name, wrong, dtype)) from None


def _misfit(name: str, value: Any, dtype: str) -> str:
    return f"column {name!r} has values such as {value} that dtype {dtype!r} cannot hold: use another"


def _make_numbers(output: FieldRecipe, parts: list[pa.Array]) -> list[Any]:
    return [_numbers(name, part, output.dtype) for name, part in zip(output.sources, parts)]


def _make_list(output: FieldRecipe, parts: list[pa.Array]) -> pa.Array:
    (column,), (name,) = parts, output.sources
    return _lists_as(column, to_arrow(_numbers(name, column.flatten(), output.dtype)))


def _make_text(output: FieldRecipe, parts: list[pa.Array]) -> pa.Array:
    try:
        parts[0].validate(full=True)
    except pa.ArrowInvalid:
        name = output.sources[0]
        raise RefusedRows(f"column {name!r} has texts that are not UTF-8: cast it to binary") from None
    return parts[0]


def _make_binary(output: FieldRecipe, parts: list[pa.Array]) -> pa.Array:
    return parts[0]


def made(output: FieldRecipe, parts: list[pa.Array]) -> Any:
    """Return a field without nulls: of numbers, a list of NumPy's arrays, one for each column; otherwise one array."""
    return _MAKERS[output.kind](output, parts)


_MAKERS: Mapping[str, Callable[[FieldRecipe, list[pa.Array]], Any]] = {
    "number": _make_numbers,
    "list": _make_list,
    "text": _make_text,
    "binary": _make_binary,
}
