"""Conversions between Arrow and NumPy that do not import pandas."""

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from distributor.data import arrays
from distributor.data.arrays import texts, to_arrow, to_numpy

NUMBERS = ["int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_are_shared(dtype: str) -> None:
    values: Any = np.arange(7).astype(dtype)
    column = to_arrow(values)
    column.validate(full=True)
    assert column.equals(pa.array(values))
    part = to_numpy(column.slice(2, 3))
    assert part.dtype == values.dtype and part.tolist() == [2, 3, 4]
    assert np.shares_memory(part, values)
    assert to_numpy(column.slice(7)).tolist() == []


def test_what_lies_apart_is_copied() -> None:
    values: Any = np.arange(8.0)[::2]
    assert to_arrow(values).to_pylist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([True, False]),
        pa.array([1, None, 3]),
        pa.array([1.5, None]).slice(1),
        pa.array(["a", "b"]),
        pa.array([b"a"]).slice(0, 0),
        pa.nulls(2, pa.int32()),
    ],
)
def test_other_columns_are_as_in_pyarrow(column: pa.Array) -> None:
    assert repr(to_numpy(column)) == repr(column.to_numpy(zero_copy_only=False))


@pytest.mark.parametrize("values", [np.arange(-3, 16), np.arange(19) % 3 == 0, np.arange(19.0)])
def test_rows_may_be_null(values: Any) -> None:
    is_null: Any = np.arange(19) % 5 == 1
    column = to_arrow(values, is_null)
    column.validate(full=True)
    assert column.equals(pa.array(values, mask=is_null))


@pytest.mark.parametrize(
    "values",
    [[], [None], ["a"], ["", "\u00e4\U0001f600", None, "a\0b", *map(str, range(20)), None]],
)
@pytest.mark.parametrize("most", [1 << 30, 3])
def test_texts_are_as_in_pyarrow(values: list[str | None], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_MOST", most)
    column = texts(values)
    column.validate(full=True)
    assert column.equals(pa.array(values, pa.string()))


@pytest.mark.parametrize(
    "values",
    [np.array([True, False]), np.array(["a", "b"]), np.array([1, "x"], object), np.array([1.0], ">f8")],
)
def test_other_arrays_are_as_in_pyarrow(values: Any) -> None:
    try:
        expected: Any = pa.array(values)
    except pa.ArrowException as error:
        with pytest.raises(type(error)):
            to_arrow(values)
    else:
        assert to_arrow(values).equals(expected)


SCORE = """
import sys
import numpy as np, pyarrow as pa
from distributor.data import arrays, writer
from distributor.scoring import partition

field = writer.FieldRecipe("x", ("a", "b"), "number", "float32", True)
number, several = pa.Array.from_buffers(pa.float32(), 3, [None, pa.py_buffer(bytes(12))]), pa.list_(pa.float32())
lists = pa.ListArray.from_arrays(arrays.to_arrow(np.arange(4, dtype="int32")), number)
packed = pa.RecordBatch.from_arrays([lists], ["a"])
assert writer.unpacked(packed, [("a",)]).num_rows == 3
assert not writer.has_null(lists).any()
values = partition._values(field, [number, number])
assert partition._values(writer.FieldRecipe("l", ("l",), "list", "float32"), [lists]).shape == (3, 1)
partition._column("score", pa.float32(), values[:, :1], np.arange(3), 3)
partition._column("scores", several, values, np.arange(3), 3)
words = partition._column("word", pa.string(), ["a", "b"], np.array([0, 2]), 3)
assert words.to_pylist() == ["a", None, "b"] and writer.has_null(words).tolist() == [False, True, False]
assert writer._dropped({"w": words}, 3)["w"].to_pylist() == ["a", "b"]
partition._column("word", pa.string(), np.array(["a", "b", "c"]), np.arange(3), 3)
partition._column("is_odd", pa.bool_(), np.array([True, False]), np.array([0, 1]), 3)
partition._column("none", several, [], np.array([], int), 3)
options = {"outputs": (), "batch_rows": 8, "on_error": "null", "error_column": "error"}
task = partition.ScoringTask(None, (writer.FieldRecipe("w", ("w",), "text"),), (), (), **options)
((batch, request),) = task._requests([pa.RecordBatch.from_arrays([words], ["w"])])
assert request.inputs == {"w": ["a", "b"]}
assert task._scored(batch, partition.ScoreAnswer(), 0).column("error").to_pylist()[1] == "column 'w' is null"
print("pandas" in sys.modules)
"""


def test_a_worker_that_scores_does_not_import_pandas() -> None:
    found = subprocess.run([sys.executable, "-c", SCORE], stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout == "False\n"
