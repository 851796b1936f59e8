"""What a Spark task makes of rows and of outputs."""

from collections import UserDict

import numpy as np
import pyarrow as pa
import pytest

from distributor.data.writer import FieldRecipe
from distributor.scoring.client import ModelError, ModelOrder
from distributor.scoring.partition import ScoringTask, _Batch, _column

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


def test_a_row_that_fails_is_shown_even_if_python_has_no_such_time():
    rows = pa.record_batch({"t": pa.array([4 * 10**17], pa.timestamp("us", "UTC")), "a": [1.5]})
    shown = task(FieldRecipe("t", ("t",), "number", "int64"), FieldRecipe("a", ("a",), "number", "float64"))
    assert shown._shown(_Batch(rows, {}), 0) == "Its inputs: t = a timestamp[us, tz=UTC], a = 1.5"


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
