"""How numbers stand side by side in a file."""

import numpy as np
import pytest

from distributor.data.manifest import Field
from distributor.data.row_layout import row_type, stored


def test_elements_are_aligned_and_the_largest_come_first():
    fields = (Field("a", "number", "bool"), Field("b", "number", "float32", 3), Field("c", "number", "int64"))
    kind = row_type(fields)
    assert {name: kind.fields[name][1] for name in kind.names} == {"2": 0, "1": 8, "0": 20}
    assert kind.itemsize == 24, "the next row is aligned too"


@pytest.mark.parametrize("kind", ["text", "binary", "list"])
def test_other_fields_are_left_out(kind):
    assert row_type((Field("a", kind), Field("b", "number", "int8"))).names == ("1",)
    assert row_type((Field("a", kind),)).names == ()


def test_a_boolean_is_a_byte():
    assert stored("bool") == np.uint8
