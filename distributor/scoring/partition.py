"""Scores the rows of one partition: runs in a Spark task, where it arrives by value, with pyarrow and NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from distributor.data.writer import FieldRecipe, Packs, has_null, made, short, sources_of, unpacked
from distributor.scoring.client import ModelClient, ModelError, ModelOrder
from distributor.scoring.wire import ScoreAnswer, ScoreRequest

_SHOWN = 60  # characters of a value in an error


@dataclass(frozen=True)
class ScoringTask:
    """What each task does.

    Attributes:
        inputs: how columns become inputs.
        packs: see :func:`distributor.data.writer.unpacked`.
        keep: the columns that come before the outputs.
        outputs: names and types.
        error_column: gets the errors of rows; empty where an error ends the job.
    """

    model: ModelOrder
    inputs: tuple[FieldRecipe, ...]
    packs: Packs
    keep: tuple[str, ...]
    outputs: tuple[tuple[str, Any], ...]
    batch_rows: int
    on_error: Literal["raise", "null"]
    error_column: str

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield each batch with its outputs: one row for each row."""
        first = 0
        for batch, answer in ModelClient(self.model).answers(self._requests(batches)):
            yield self._scored(batch, answer, first)
            first += batch.batch.num_rows

    def _requests(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[_Batch, ScoreRequest]]:
        outputs = tuple(name for name, _ in self.outputs)
        for batch in (unpacked(each, self.packs) for each in batches):
            if not batch.num_rows:
                continue
            columns = {name: short(batch.column(name)) for name in sources_of(self.inputs)}
            nulls = {name: rows for name, column in columns.items() if (rows := has_null(column)).any()}
            bad: Any = np.zeros(batch.num_rows, bool)
            for rows in nulls.values():
                bad |= rows
            if nulls:
                columns = {name: column.filter(pa.array(~bad)) for name, column in columns.items()}
            inputs = {each.name: _values(each, [columns[name] for name in each.sources]) for each in self.inputs}
            rows = int(batch.num_rows - bad.sum())
            yield (
                _Batch(batch, bad, nulls),
                ScoreRequest(inputs, rows, outputs, self.batch_rows, self.on_error == "null"),
            )

    def _scored(self, batch: _Batch, answer: ScoreAnswer, first: int) -> pa.RecordBatch:
        if answer.error:
            raise ModelError(answer.error)
        places = np.flatnonzero(~batch.bad)  # of the request's rows
        errors = {int(places[row]): text for row, text in answer.failed.items()}
        for name, rows in batch.nulls.items():
            errors |= {int(row): f"column {name!r} is null" for row in np.flatnonzero(rows) if int(row) not in errors}
        if errors and self.on_error == "raise":
            row = min(errors)
            raise ModelError(
                f"row {first + row} of partition {_partition()} fails: {errors[row]}. {self._shown(batch, row)}"
            )
        done = np.array(sorted(set(range(batch.batch.num_rows)) - set(errors)), "int64")
        columns = [batch.batch.column(name) for name in self.keep]
        for (name, kind), values in zip(self.outputs, answer.outputs or ([],) * len(self.outputs)):
            columns.append(_column(name, kind, values, done, batch.batch.num_rows))
        names = [*self.keep, *(name for name, _ in self.outputs)]
        if self.error_column:
            columns.append(pa.array([errors.get(row) for row in range(batch.batch.num_rows)], pa.string()))
            names.append(self.error_column)
        return pa.RecordBatch.from_arrays(columns, names)

    def _shown(self, batch: _Batch, row: int) -> str:
        """Return the inputs of a row, for an error."""
        shown = []
        for name in sources_of(self.inputs):
            value = batch.batch.column(name)[row].as_py()
            shown.append(f"{name} = {repr(value)[:_SHOWN]}")
        return "Its inputs: " + ", ".join(shown)


@dataclass(frozen=True)
class _Batch:
    batch: pa.RecordBatch
    bad: Any  # for each row, whether it has a null
    nulls: dict[str, Any]  # the same for each column that has any


def _partition() -> int:
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    return -1 if context is None else int(context.partitionId())


def _values(field: FieldRecipe, parts: list[Any]) -> Any:
    """Return an input as an array, or as a list of texts, bytes, or arrays of different lengths."""
    values = made(field, parts)
    if field.kind == "number":
        array = np.stack(values, axis=1) if field.is_packed else np.array(values[0])
        return array.view(bool) if field.dtype == "bool" else array
    if field.kind != "list":
        return values.to_pylist()
    flat = np.array(values.values)
    flat = flat.view(bool) if field.dtype == "bool" else flat
    offsets = np.array(values.offsets)
    lengths = np.diff(offsets)
    if len(lengths) and (lengths == lengths[0]).all():
        return flat.reshape(len(lengths), lengths[0])
    return [flat[begin:end] for begin, end in itertools.pairwise(offsets)]


def _column(name: str, kind: Any, values: Any, done: Any, rows: int) -> Any:
    """Return an output as a column, with nulls in the rows that are not ``done``."""
    try:
        column = _arrow(kind, values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ModelError(f"the output {name!r} cannot become {kind}: {error}") from None
    if len(done) == rows:
        return column
    places = np.full(rows, -1)
    places[done] = np.arange(len(done))
    return column.take(pa.array(places, mask=places < 0))


def _arrow(kind: Any, values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.ndim == 2 and pa.types.is_list(kind):
        offsets = np.arange(0, values.size + 1, values.shape[1] or 1, dtype="int32")
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)).cast(kind.value_type))
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return pa.array(values).cast(kind)
    return pa.array(list(values), kind)
