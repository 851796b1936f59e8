"""What a Spark task makes of rows and of outputs."""

from collections import UserDict
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from distributor.data.writer import FieldRecipe
from distributor.scoring.client import ModelError, ModelOrder
from distributor.scoring.partition import ScoringTask, _Batch, _column
from distributor.scoring.wire import ScoreAnswer

ORDER = ModelOrder(key="k", package=b"", call=b"", processes=1, keep=1.0, timeout=60.0)


def task(*inputs, **options):
    given = {"outputs": (("y", pa.float32()),), "batch_rows": 8, "on_error": "raise", "error_column": "", **options}
    return ScoringTask(ORDER, inputs, (), (), **given)


def column(kind, values):
    return _column("y", kind, values, np.arange(len(values)), len(values)).to_pylist()


def test_a_list_of_numbers_may_be_of_arrays_without_dimensions():
    """As of tensors that a model returns for one row after the other."""
    assert column(pa.float32(), [np.array(1.5), np.array(2.0, "float32")]) == [1.5, 2.0]
    assert column(pa.list_(pa.int32()), [[np.array(1)], []]) == [[1], []]


@pytest.mark.parametrize("value", [2**70, 300, "a"])
def test_a_value_that_the_column_cannot_hold_is_an_error_with_its_name(value):
    with pytest.raises(ModelError, match="the output 'y' cannot become int8: "):
        column(pa.int8(), [value])


STRUCT = pa.struct([("a", pa.string()), ("n", pa.int32())])


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [2**60 + 1, None, 1.5]),
        (pa.int32(), [np.float32(1.5)]),
        (pa.int32(), [Decimal("1.5")]),
        (pa.timestamp("us", "UTC"), [1.5]),
        (pa.date32(), [1.5]),
        (pa.list_(pa.int32()), [[1, 2], None, [1.5]]),
        (pa.list_(pa.int32()), [np.array([1.0, 1.5]), np.array([1])]),
        (pa.list_(pa.list_(pa.int32())), [np.array([[1.5]]), np.array([[1], [2]])]),
        (STRUCT, [None, {"a": "b"}, {"n": 1.5}]),
        (STRUCT, [("b", 1.5)]),
        (STRUCT, [[("a", "b"), ("n", 1.5)]]),
        (pa.list_(STRUCT), [[{"n": 1}, {"n": 1.5}]]),
        (pa.map_(pa.string(), pa.int32()), [{"a": 1}, None, {"b": 1.5}]),
        (pa.map_(pa.string(), pa.int32()), [[("a", 1), ("b", 1.5)]]),
        (pa.map_(pa.int32(), pa.string()), [{1.5: "a"}]),
    ],
)
def test_fractions_are_no_whole_numbers(kind, values):
    with pytest.raises(ModelError, match=r"the output 'y' cannot become .*: 1\.5 is no whole number"):
        column(kind, values)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [2**60 + 1, None, -1]),
        (pa.int64(), [1.0, None, np.float64(2.0**60), Decimal(3)]),
        (pa.bool_(), [True, None, False]),
        (pa.float32(), [1.5, None, 2]),
        (pa.list_(pa.int32()), [[1.0, None, 2], None, []]),
        (pa.list_(STRUCT), [[{"a": None, "n": 2.0}, None], None]),
        (pa.list_(pa.list_(pa.float32())), [[[1.5], []], None]),
        (pa.struct([("n", pa.float32())]), [{"n": 1.5}, None]),
    ],
)
def test_values_of_lists_are_kept(kind, values):
    assert column(kind, values) == values


def test_a_row_that_fails_is_shown_even_if_python_has_no_such_time():
    rows = pa.record_batch({"t": pa.array([4 * 10**17], pa.timestamp("us", "UTC")), "a": [1.5]})
    shown = task(FieldRecipe("t", ("t",), "number", "int64"), FieldRecipe("a", ("a",), "number", "float64"))
    assert shown._shown(_Batch(rows, {}), 0) == "Its inputs: t = a timestamp[us, tz=UTC], a = 1.5"


def test_a_text_that_is_not_utf_8_fails_as_a_row():
    texts = pa.array([b"a", b"b\xffc", None, b"\xc3", "\u00e4".encode()], pa.binary()).view(pa.string())
    rows = pa.record_batch({"t": texts, "a": pa.array([0, 1, 2, None, 4], "float32")})
    both = FieldRecipe("t", ("t",), "text"), FieldRecipe("a", ("a",), "number", "float32")
    ((batch, request),) = task(*both)._requests([rows.slice(1)])
    assert request.inputs["t"] == ["\u00e4"]
    assert batch.errors == {
        0: "column 't' is not UTF-8: invalid start byte at byte 1",
        1: "column 't' is null",
        2: "column 't' is not UTF-8: unexpected end of data at byte 0",
    }
    with pytest.raises(ModelError, match=r"row 0 of partition -1 fails: column 't' is not UTF-8: .*a string, a = 1.0"):
        task(*both)._scored(batch, ScoreAnswer(), 0)


@pytest.mark.parametrize("on_error", ["raise", "null"])
def test_map_may_change_its_inputs_and_fail(on_error):
    """Rows beside the one at fault come to it again, and as they were."""

    def function(batch):
        batch["x"] += 100
        if (batch["x"] == 103).any():
            raise ValueError("three")
        return UserDict(batch)

    rows = pa.record_batch({"a": pa.array([0, 1, 2, None, 3, 4, 5], "float32")})
    mapped = task(FieldRecipe("x", ("a",), "number", "float32", is_packed=True), map=function, on_error=on_error)
    ((batch, request),) = mapped._requests([rows])
    assert request.inputs["x"].tolist() == [[100], [101], [102], [104], [105]]
    assert request.rows == 5
    assert batch.errors[3] == "column 'a' is null"
    assert "ValueError: three" in batch.errors[4]
    assert len(batch.errors) == 2
