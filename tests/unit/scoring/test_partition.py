"""What a Spark task makes of rows and of outputs."""

import numpy as np
import pyarrow as pa
import pytest

from distributor.scoring.client import ModelError
from distributor.scoring.partition import _column


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
