"""Scores the rows of one partition: runs in a Spark task, where it arrives by value, with pyarrow and NumPy."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from distributor.data.arrays import texts, to_arrow, to_numpy
from distributor.data.writer import FieldRecipe, Packs, has_null, made, short, sources_of, unpacked
from distributor.scoring.client import ModelClient, ModelError, ModelOrder, release
from distributor.scoring.halving import halved, joined
from distributor.scoring.task_gpus import gpus_of_model
from distributor.scoring.wire import ScoreAnswer, ScoreRequest

Map = Callable[[dict[str, Any]], dict[str, Any]]

_HALVED = (
    "the GPU's memory does not suffice for a batch of %d rows, which was halved, as others of that size are: pass a "
    "smaller batch_rows= (it is %d)"
)
_SENT = 4 << 20  # bytes of inputs at once: they stay in caches

_FIRST = 8  # rows whose size is that of all

_SHOWN = 60  # characters of a value in an error


@dataclass(frozen=True)
class ScoringTask:
    """What each task does.

    Attributes:
        inputs: how columns become inputs.
        packs: see :func:`distributor.data.writer.unpacked`.
        keep: the columns that come before the outputs.
        outputs: names and types.
        map: makes inputs of inputs, in the task.
        deterministic: whether the model gets exactly ``batch_rows`` rows each time.
        error_column: gets the errors of rows; empty where an error ends the job.
        num_gpus: how many the model has.
        driver_gpus: addresses of the driver's GPUs, if tasks run in its JVM.
    """

    model: ModelOrder
    inputs: tuple[FieldRecipe, ...]
    packs: Packs
    keep: tuple[str, ...]
    outputs: tuple[tuple[str, Any], ...]
    batch_rows: int
    on_error: Literal["raise", "null"]
    error_column: str
    map: Map | None = None
    deterministic: bool = False
    num_gpus: int = 0
    driver_gpus: tuple[str, ...] = ()

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield each batch with its outputs: one row for each row."""
        first, has_warned = 0, False
        gpus = gpus_of_model(self.num_gpus, _gpus_of_task(), self.driver_gpus, _partition()) if self.num_gpus else ()
        for batch, answer in ModelClient(self.model, gpus, _cpus_of_task()).answers(self._requests(batches)):
            if answer.halved_rows and not has_warned:
                has_warned = True
                logging.getLogger("distributor").warning(_HALVED, answer.halved_rows, self.batch_rows)
            yield self._scored(batch, answer, first)
            first += batch.batch.num_rows

    def _requests(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[_Batch, ScoreRequest]]:
        rows = self.batch_rows
        for whole in (unpacked(each, self.packs) for each in batches):
            at = 0
            while at < whole.num_rows:
                batch, request = self._request(whole.slice(at, rows))
                at += batch.batch.num_rows
                rows = _rows_of_next(request, rows)
                yield batch, request

    def _request(self, batch: pa.RecordBatch) -> tuple[_Batch, ScoreRequest]:
        columns = {name: short(batch.column(name)) for name in sources_of(self.inputs)}
        errors: dict[int, str] = {}
        for name, column in columns.items():
            nulls = {int(row): f"column {name!r} is null" for row in np.flatnonzero(has_null(column))}
            errors = _not_utf_8(name, column) | nulls | errors
        if errors:
            good = to_arrow(_without(errors, batch.num_rows))
            columns = {name: column.take(good) for name, column in columns.items()}

        def inputs(first: int, last: int) -> dict[str, Any]:
            parts = {name: column.slice(first, last - first) for name, column in columns.items()}
            return {each.name: _values(each, [parts[name] for name in each.sources]) for each in self.inputs}

        request = ScoreRequest(
            inputs(0, batch.num_rows) if self.map is None else self._mapped(self.map, inputs, errors, batch.num_rows),
            batch.num_rows - len(errors),
            tuple(name for name, _ in self.outputs),
            self.batch_rows,
            self.on_error == "null",
            self.deterministic,
        )
        return _Batch(batch, errors), request

    def _mapped(
        self, function: Map, inputs: Callable[[int, int], dict[str, Any]], errors: dict[int, str], rows: int
    ) -> dict[str, Any]:
        """Return what ``map=`` makes of inputs, and note the rows with which it fails."""
        places = _without(errors, rows)
        failed: dict[int, str] = {}

        def call(first: int, last: int) -> tuple[Any, int]:
            return function(inputs(first, last)), last - first  # it may have changed those of an earlier call

        made = halved(call, 0, len(places), failed, all_rows=True) if len(places) else []
        parts = [_checked(each, count) for each, count in made]
        errors.update({int(places[row]): text for row, text in failed.items()})
        names = list(parts[0]) if parts else [each.name for each in self.inputs]
        return {name: joined([part[name] for part in parts]) for name in names}

    def _scored(self, batch: _Batch, answer: ScoreAnswer, first: int) -> pa.RecordBatch:
        if answer.error:
            raise ModelError(answer.error)
        places = _without(batch.errors, batch.batch.num_rows)  # of the request's rows
        errors = batch.errors | {int(places[row]): text for row, text in answer.failed.items()}
        if errors and self.on_error == "raise":
            row = min(errors)
            raise ModelError(
                f"row {first + row} of partition {_partition()} fails: {errors[row]}. {self._shown(batch, row)}"
            )
        done = _without(errors, batch.batch.num_rows)
        columns = [batch.batch.column(name) for name in self.keep]
        for (name, kind), values in zip(self.outputs, answer.outputs or ([],) * len(self.outputs)):
            columns.append(_column(name, kind, values, done, batch.batch.num_rows))
        names = [*self.keep, *(name for name, _ in self.outputs)]
        if self.error_column:
            columns.append(texts([errors.get(row) for row in range(batch.batch.num_rows)]))
            names.append(self.error_column)
        return pa.RecordBatch.from_arrays(columns, names)

    def _shown(self, batch: _Batch, row: int) -> str:
        """Return the inputs of a row, for an error."""
        shown = [f"{name} = {_text(batch.batch.column(name)[row])}" for name in sources_of(self.inputs)]
        return "Its inputs: " + ", ".join(shown)


class ReleaseTask:
    """Ends the models of an executor that no task uses."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield how many there were, once."""
        for _ in batches:
            pass
        yield pa.RecordBatch.from_arrays([pa.array([release()], pa.int32())], ["ended"])


@dataclass(frozen=True)
class _Batch:
    batch: pa.RecordBatch
    errors: dict[int, str]  # of the rows that the model does not get


def _text(value: Any) -> str:
    try:
        return repr(value.as_py())[:_SHOWN]
    except (ValueError, OverflowError, KeyError):  # Python has no such time, or time zone
        return f"a {value.type}"


def _not_utf_8(name: str, column: Any) -> dict[int, str]:
    """Return the errors of texts: Spark lets any bytes be one."""
    errors: dict[int, str] = {}
    if not pa.types.is_string(column.type):
        return errors
    with suppress(pa.ArrowInvalid):
        column.validate(full=True)
        return errors
    for row, value in enumerate(column.cast(pa.binary()).to_pylist()):
        try:
            (value or b"").decode()
        except UnicodeDecodeError as error:
            errors[row] = f"column {name!r} is not UTF-8: {error.reason} at byte {error.start}"
    return errors


def _rows_of_next(request: ScoreRequest, rows: int) -> int:
    """Return how many rows to send next: batches of the model of about :data:`_SENT` together, by the first rows."""
    first = min(request.rows, _FIRST)
    size = sum(_size(values[:first]) for values in request.inputs.values())
    return request.batch_rows * max(1, _SENT * first // (size * request.batch_rows)) if size else rows


def _size(values: Any) -> int:
    """Return about how many bytes an array, or a list of texts, bytes or arrays has."""
    if isinstance(values, list):
        return sum(_size(each) if isinstance(each, np.ndarray) else sys.getsizeof(each) for each in values)
    return int(values.nbytes)


def _checked(made: Any, rows: int) -> dict[str, Any]:
    """Return what ``map=`` has made of rows, as arrays and lists."""
    if not isinstance(made, Mapping):  # such as what a tokenizer returns
        raise ModelError(f"map= must return a dict of inputs, not {type(made).__name__}")
    for name, values in made.items():
        if len(values) != rows:
            raise ModelError(f"map= returned {len(values)} values of {name!r} for {rows} rows")
    return {name: values.numpy() if hasattr(values, "numpy") else values for name, values in made.items()}


def _without(errors: Mapping[int, str], rows: int) -> Any:
    """Return the rows that have no error."""
    return np.array(sorted(set(range(rows)) - set(errors)), "int64") if errors else np.arange(rows)


def _partition() -> int:
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    return -1 if context is None else int(context.partitionId())


def _cpus_of_task() -> int:
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    return 0 if context is None else int(context.cpus())


def _gpus_of_task() -> tuple[str, ...]:
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    resources = {} if context is None else context.resources()
    return tuple(sorted(resources["gpu"].addresses)) if "gpu" in resources else ()


def _values(field: FieldRecipe, parts: list[Any]) -> Any:
    """Return an input as an array, or as a list of texts, bytes, or arrays of different lengths."""
    if field.kind == "number":
        values = made(field, parts)
        array = np.stack(values, axis=1) if field.is_packed else np.array(values[0])
        return array.view(bool) if field.dtype == "bool" else array
    return _lists(field, parts[0]) if field.kind == "list" else parts[0].to_pylist()


def _lists(field: FieldRecipe, column: Any) -> Any:
    """Return lists of numbers, or of lists: an array if all have one length, otherwise a list of arrays."""
    if not pa.types.is_list(column.type):
        (flat,) = made(replace(field, kind="number"), [column])
        flat = np.array(flat)
        return flat.view(bool) if field.dtype == "bool" else flat
    values = _lists(field, short(column.flatten()))
    lengths = to_numpy(column.value_lengths())
    if isinstance(values, np.ndarray) and len(lengths) and (lengths == lengths[0]).all():
        return values.reshape(len(lengths), lengths[0], *values.shape[1:])
    ends = np.cumsum(lengths)
    return [values[end - length : end] for length, end in zip(lengths, ends)]


def _column(name: str, kind: Any, values: Any, done: Any, rows: int) -> Any:
    """Return an output as a column, with nulls in the rows that are not ``done``."""
    if not len(done):
        return pa.nulls(rows, kind)
    try:
        column = _arrow(kind, values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"the output {name!r} cannot become {kind}: {error}") from None
    if len(done) == rows:
        return column
    places = np.full(rows, -1)
    places[done] = np.arange(len(done))
    return column.take(to_arrow(places, places < 0))


def _arrow(kind: Any, values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.ndim > 1 and pa.types.is_list(kind):
        offsets = np.arange(0, len(values) * values.shape[1] + 1, values.shape[1] or 1, dtype="int32")
        offsets = offsets if values.shape[1] else np.zeros(len(values) + 1, "int32")
        inner = _arrow(kind.value_type, values.reshape(-1, *values.shape[2:]))
        return pa.ListArray.from_arrays(to_arrow(offsets), inner)
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if isinstance(values, np.ndarray) and values.ndim == 1:
        column = to_arrow(values)
        return column if column.type == kind else column.cast(kind)  # for which pyarrow imports more
    plain = [_plain(each) for each in values]
    if pa.types.is_string(kind) and set(map(type, plain)) <= {str, type(None)}:
        return texts(plain)
    column = pa.array(plain, kind)
    _check_whole(kind, plain)
    return column


def _check_whole(kind: Any, values: Any) -> None:
    """Raise ValueError for a fraction in place of a whole number: pyarrow would cut it off."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "fO":
        return
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        kinds = {each for each in set(map(type, values)) if issubclass(each, (float, np.floating, Decimal))}
        numbers = np.array([each for each in values if type(each) in kinds] if kinds else [], float)
        if len(wrong := numbers[numbers != np.trunc(numbers)]):
            raise ValueError(f"{wrong[0]} is no whole number")
    there = [each for each in values if each is not None] if pa.types.is_nested(kind) else []
    if pa.types.is_list(kind):
        for each in there:
            _check_whole(kind.value_type, each)
    elif pa.types.is_map(kind):
        pairs = [pair for each in there for pair in dict(each).items()]
        _check_whole(pa.struct([kind.key_field, kind.item_field]), pairs)
    elif pa.types.is_struct(kind):
        for place, part in enumerate(kind):
            parts = [each[place] if isinstance(each, tuple) else dict(each).get(part.name) for each in there]
            _check_whole(part.type, parts)


def _plain(value: Any) -> Any:
    """Return a row as pyarrow takes it: numbers, arrays of one dimension, and lists of these."""
    if isinstance(value, np.ndarray) and value.ndim != 1:
        return list(map(_plain, value)) if value.ndim else value[()]
    return [_plain(each) for each in value] if isinstance(value, list) else value
