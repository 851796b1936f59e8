"""What columns become, and what is refused before any row is read."""

import datetime
import re
from decimal import Decimal

import numpy as np
import pytest

from distributor.data.source import Data, recipe, shared_by
from distributor.errors import ConfigurationError
from distributor.values.job import Widths

TYPES = {
    "a": "float",
    "b": "double",
    "n": "int",
    "flag": "boolean",
    "price": "decimal(10,2)",
    "day": "date",
    "at": "timestamp",
    "name": "string",
    "image": "binary",
    "features": "vector",
    "pixels": "array<tinyint>",
    "point": "struct<x:int>",
    "words": "array<string>",
}


def fields(**options):
    return {each.name: (each.kind, each.dtype, each.width) for each in recipe(Data(None, **options), TYPES).fields}


def test_columns_keep_their_types():
    names = [name for name in TYPES if name not in ("point", "words")]
    assert fields(columns=names) == {
        "a": ("number", "float32", None),
        "b": ("number", "float64", None),
        "n": ("number", "int32", None),
        "flag": ("number", "bool", None),
        "price": ("number", "float64", None),
        "day": ("number", "int32", None),
        "at": ("number", "int64", None),
        "name": ("text", "", None),
        "image": ("binary", "", None),
        "features": ("list", "float32", None),
        "pixels": ("list", "int8", None),
    }


def test_packed_columns_are_promoted_unless_a_dtype_is_given():
    assert fields(pack={"x": ["a", "a"]})["x"] == ("number", "float32", 2)
    assert fields(pack={"x": ["a", "b", "n"]})["x"] == ("number", "float64", 3)
    assert fields(pack={"x": ["a", "b"]}, dtypes={"x": "float32"})["x"] == ("number", "float32", 2)
    assert fields(pack={"x": ["a"]}, label="n") == {"x": ("number", "float32", 1), "n": ("number", "int32", None)}
    assert fields(pack={"x": "features"})["x"] == ("list", "float32", None)


def test_masks_have_the_shape_of_what_they_mask():
    found = fields(pack={"x": ["a", "b"]}, columns=["name", "pixels"], nulls="mask")
    assert found["x_mask"] == ("number", "bool", 2)
    assert found["name_mask"] == ("number", "bool", None)
    assert found["pixels_mask"] == ("list", "bool", None)


def test_a_mask_and_a_column_of_one_name_are_refused():
    types = {"image": "binary", "image_mask": "binary"}
    with pytest.raises(ConfigurationError, match=r"mask of 'image' has the name of the field 'image_mask': .*pack="):
        recipe(Data(None, nulls="mask"), types)
    renamed = recipe(Data(None, pack={"photo": "image"}, columns=["image_mask"], nulls="mask"), types).fields
    assert [each.name for each in renamed] == ["photo", "image_mask", "photo_mask", "image_mask_mask"]


@pytest.mark.parametrize(
    ("column", "value", "made"),
    [
        ("n", 36.0, 36),
        ("a", 36.7, 36.7),
        ("b", float("inf"), float("inf")),
        ("price", Decimal("0.5"), 0.5),
        ("flag", True, 1),
        ("day", 18262, 18262),
        ("at", -1, -1),
        ("name", "?", "?"),
        ("image", b"", b""),
        ("pixels", np.int64(-128), -128),
    ],
)
def test_nulls_become_what_their_columns_can_hold(column, value, made):
    assert recipe(Data(None, columns=[column], nulls={column: value}), TYPES).fills == ((column, made),)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("n", 36.7, "whole number from -2147483648 to 2147483647, or cast the column"),
        ("n", 1 << 31, "whole number from"),
        ("n", float("nan"), "whole number from"),
        ("n", None, "whole number from"),
        ("a", 1e39, "number that float32 can hold"),
        ("b", "1", "number that float64 can hold"),
        ("flag", 2, "True or False"),
        ("day", datetime.date(2020, 1, 1), "whole number of days since 1970-01-01"),
        ("at", datetime.datetime(2020, 1, 1), "whole number of microseconds since 1970-01-01 in UTC"),
        ("name", 0, "str"),
        ("image", "?", "bytes"),
        ("pixels", 128, "whole number from -128 to 127"),
    ],
)
def test_values_for_nulls_that_a_column_cannot_hold_are_refused(column, value, words):
    text = f"nulls of column {column!r} ({TYPES[column]}) cannot become {value!r}: give "
    with pytest.raises(ConfigurationError, match=f"{re.escape(text)}.*{words}"):
        recipe(Data(None, columns=[column], nulls={column: value}), TYPES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": ["point"]}, r"column 'point' is struct<x:int>, which has no tensor: cast it"),
        ({"columns": ["words"]}, r"column 'words' is array<string>"),
        ({"label": "flags"}, r"no column 'flags': did you mean 'flag'\?"),
        ({"pack": {"x": ["a", "name"]}}, r"packs numbers, but column 'name' is string"),
        ({"pack": {"x": []}}, r"'x' with 0 columns"),
        ({"pack": {"_x": ["a"]}}, r"must not begin with _"),
        ({"pack": {"n": ["a"]}, "label": "n"}, r"'n' is used twice"),
        ({"columns": ["a"], "dtypes": {"b": "float32"}}, r"dtypes=...\): there is no 'b': there are 'a'"),
        ({"columns": ["name"], "dtypes": {"name": "float32"}}, r"'name' is string, which is no tensor"),
        ({"columns": ["a"], "nulls": {"b": 0}}, r"nulls=...\): there is no 'b'"),
        ({"columns": []}, r"no columns"),
    ],
)
def test_what_has_no_tensor_is_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        fields(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pack": ["a"]}, r"pack=...\) must be a dict"),
        ({"columns": "a"}, r"columns=...\) must be a list"),
        ({"nulls": "ignore"}, r"nulls=...\) must be one of 'error', 'drop', 'fill', 'mask'"),
        ({"lanes": 0}, r"lanes=...\) must be a whole number of at least 1, not 0"),
        ({"dtypes": {"x": "bfloat16"}}, r"'x' must be one of bool, int8"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        Data(None, **options)


def test_the_number_of_ranks_divides_all_lanes():
    data = {"train": Data(None, lanes=12), "val": Data(None, lanes=8)}
    assert shared_by(Widths(3, 7), data) == Widths(4, 4)
    assert shared_by(Widths(1, 100), data) == Widths(1, 4)
    with pytest.raises(ConfigurationError, match=r"num_processes=3: data 'val': 8 lanes .* 3 ranks.*lanes=9"):
        shared_by(Widths(3, 3), data)
