"""What of a table the ranks get: ``Data``, and which field each column becomes."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from distributor.errors import ConfigurationError
from distributor.values.job import Widths

if TYPE_CHECKING:
    from distributor.data.writer import Recipe

#: NumPy's type by the name of the column's type in Spark.
_NUMBERS = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "uint8": "uint8",
    "float": "float32",
    "double": "float64",
    "date": "int32",
    "timestamp": "int64",
    "timestamp_ntz": "int64",
}

_DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")

#: What whole numbers mean in columns of times, for ``nulls=``.
_UNITS = {"date": " of days since 1970-01-01", "timestamp": " of microseconds since 1970-01-01 in UTC"}

_ARRAY = re.compile(r"array<(.*)>")
_NULLS = ("error", "drop", "fill", "mask")


@dataclass(frozen=True, eq=False)
class Data:
    """A table for the ranks, which read it with ``runtime.dataset(name).loader(...)``.

    Attributes:
        source: a Spark DataFrame, a pandas DataFrame, a ``pyarrow.Table``, the path of Parquet files such as
            ``"folder/*.parquet"``, or the folder of a :func:`distributor.snapshot`, which has all else already.
        pack: columns that become one tensor, by its name: ``{"x": ["age", "height"]}`` is ``batch["x"]`` of shape
            [rows, 2]. One column of arrays or of ML vectors may stand for the list.
        label: a column for the target, under its own name.
        columns: further columns, each under its own name. Without ``pack``, ``label`` and ``columns``, all columns.
        nulls: what happens to nulls: ``"error"`` (default) names columns and counts, ``"drop"`` leaves out the row,
            ``"fill"`` puts 0, ``False`` or an empty text, and ``"mask"`` does so and adds ``"<name>_mask"``, true
            where there was a value. A dict fills these columns with these values, numbers as they are in a batch; nulls
            in others are errors.
        dtypes: the type of a tensor, by its name in the batch, such as ``{"x": "float32"}``. By default, a tensor
            has its column's type, or the one to which NumPy promotes the types of its columns.
        lanes: in how many parts of equal length the rows are read (default 48). The number of ranks must divide it,
            and global batches are multiples of it.

    Raises:
        ConfigurationError: an argument is wrong.

    Example:
        >>> Data("points/*.parquet", pack={"x": ["x1", "x2"]}, label="y", dtypes={"x": "float32"}).lanes
        48
    """

    source: Any
    pack: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    label: str | None = None
    columns: Sequence[str] | None = None
    nulls: Literal["error", "drop", "fill", "mask"] | Mapping[str, Any] = "error"
    dtypes: Mapping[str, str] = field(default_factory=dict)
    lanes: int = 48

    def __post_init__(self) -> None:
        if isinstance(self.source, str):
            object.__setattr__(self, "source", os.path.expanduser(self.source))
        if not isinstance(self.pack, Mapping):
            raise ConfigurationError(
                f"Data(pack=...) must be a dict such as {{'x': ['age', 'height']}}, not {self.pack!r}"
            )
        if isinstance(self.columns, str):
            raise ConfigurationError(f"Data(columns=...) must be a list of names, not {self.columns!r}")
        if not isinstance(self.nulls, Mapping) and self.nulls not in _NULLS:
            raise ConfigurationError(
                f"Data(nulls=...) must be one of {', '.join(map(repr, _NULLS))} or a dict of values, not {self.nulls!r}"
            )
        if isinstance(self.lanes, bool) or not isinstance(self.lanes, int) or self.lanes < 1:
            raise ConfigurationError(f"Data(lanes=...) must be a whole number of at least 1, not {self.lanes!r}")
        for name, dtype in self.dtypes.items():
            if dtype not in _DTYPES:
                raise ConfigurationError(
                    f"Data(dtypes=...): {name!r} must be one of {', '.join(_DTYPES)}, not {dtype!r}"
                )

    @property
    def wanted(self) -> dict[str, tuple[str, ...]] | None:
        """The columns of each field, in order; ``None`` for all columns."""
        found: dict[str, tuple[str, ...]] = {
            name: (columns,) if isinstance(columns, str) else tuple(columns) for name, columns in self.pack.items()
        }
        singles = [*([] if self.label is None else [self.label]), *(self.columns or ())]
        if not found and not singles and self.columns is None:
            return None
        for name in singles:
            if name in found:
                raise ConfigurationError(f"Data: the name {name!r} is used twice: give pack= another name")
            found[name] = (name,)
        return found


def as_data(source: Any) -> Data:
    """Return a table as :class:`Data`."""
    return source if isinstance(source, Data) else Data(source)


def recipe(data: Data, types: Mapping[str, str]) -> Recipe:
    """Return how rows become fields. ``types`` are the columns' types, as Spark names them.

    Raises:
        ConfigurationError: a column does not exist, its type has no tensor, or two fields would have one name.
    """
    from distributor.data.writer import FieldRecipe, Recipe

    wanted = data.wanted
    wanted = {name: (name,) for name in types} if wanted is None else wanted
    if not wanted:
        raise ConfigurationError("Data: there are no columns")
    clash = next((name for name in wanted if data.nulls == "mask" and f"{name}_mask" in wanted), None)
    if clash is not None:
        raise ConfigurationError(
            f"Data(nulls='mask'): the mask of {clash!r} has the name of the field '{clash}_mask': give one another "
            "name with pack=, or leave it out with columns=[...]"
        )
    outputs = []
    for name, columns in wanted.items():
        if name.startswith("_") or not columns:
            raise ConfigurationError(
                f"Data: {name!r} with {len(columns)} columns cannot be a field: names must not "
                "begin with _, and pack= needs columns"
            )
        kinds = [_kind(column, types) for column in columns]
        packed = name in data.pack and kinds[0][0] == "number"
        if len(columns) > 1 and any(kind != "number" for kind, _ in kinds):
            odd = next(column for column, (kind, _) in zip(columns, kinds) if kind != "number")
            raise ConfigurationError(
                f"Data(pack=...): {name!r} packs numbers, but column {odd!r} is {types[odd]}: pack that column alone"
            )
        kind, dtype = kinds[0][0], _promoted([dtype for _, dtype in kinds])
        if name in data.dtypes and not dtype:
            raise ConfigurationError(f"Data(dtypes=...): {name!r} is {types[columns[0]]}, which is no tensor")
        outputs.append(FieldRecipe(name, columns, kind, data.dtypes.get(name, dtype), packed))  # type: ignore[arg-type]
    _check_names("dtypes", data.dtypes, wanted)
    if isinstance(data.nulls, Mapping):
        _check_names("nulls", data.nulls, {column: () for each in outputs for column in each.sources})
        fills = {column: _fill(column, types, value) for column, value in sorted(data.nulls.items())}
        return Recipe(tuple(outputs), "error", tuple(fills.items()))
    return Recipe(tuple(outputs), data.nulls)


def _fill(column: str, types: Mapping[str, str], value: Any) -> Any:
    """Return what nulls of a column become, as it is written; ConfigurationError if the column cannot hold it."""
    import numpy as np

    kind, dtype = _kind(column, types)
    made: type = {"text": str, "binary": bytes}.get(kind, float if dtype.startswith("float") else int)
    is_number = isinstance(value, (Real, Decimal))
    if not dtype:
        fits, wanted = isinstance(value, made), made.__name__
    elif dtype == "bool":
        fits, wanted = isinstance(value, (bool, np.bool_)), "True or False"
    elif made is float:
        fits = is_number and not float(np.finfo(dtype).max) < abs(value) < math.inf
        wanted = f"a number that {dtype} can hold"
    else:
        limits, unit = np.iinfo(dtype), next((text for name, text in _UNITS.items() if name in types[column]), "")
        fits = is_number and limits.min <= value <= limits.max and value % 1 == 0
        wanted = f"a whole number{unit or f' from {limits.min} to {limits.max}, or cast the column'}"
    if not fits:
        raise ConfigurationError(
            f"Data(nulls=...): nulls of column {column!r} ({types[column]}) cannot become {value!r}: give {wanted}"
        )
    return made(value)


def _check_names(option: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in given:
        if name not in known:
            raise ConfigurationError(f"Data({option}=...): there is no {name!r}{_meant(name, known)}")


def _meant(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f": did you mean {close[0]!r}?" if close else f": there are {', '.join(map(repr, list(known)[:20]))}"


def _kind(column: str, types: Mapping[str, str]) -> tuple[str, str]:
    if column not in types:
        raise ConfigurationError(f"Data: there is no column {column!r}{_meant(column, types)}")
    name = types[column]
    if name in ("string", "binary"):
        return {"string": "text", "binary": "binary"}[name], ""
    if name == "vector":
        return "list", "float32"
    array = _ARRAY.fullmatch(name)
    dtype = _dtype(name if array is None else array[1])
    if dtype is None:
        raise ConfigurationError(
            f"Data: column {column!r} is {name}, which has no tensor: cast it to a number, a string, binary or an "
            "array of numbers, or leave it out with columns=[...]"
        )
    return "number" if array is None else "list", dtype


def _dtype(name: str) -> str | None:
    return "float64" if name.startswith("decimal") else _NUMBERS.get(name)


def _promoted(dtypes: Sequence[str]) -> str:
    if len(set(dtypes)) == 1:
        return dtypes[0]
    import numpy as np

    return str(np.result_type(*dtypes))


def misfit(lanes: int, world_size: int) -> str:
    """Return why data with ``lanes`` lanes cannot be shared by ``world_size`` ranks, and what to do."""
    several = -(-lanes // world_size) * world_size
    return (
        f"{lanes} lanes of data cannot be shared equally by {world_size} ranks: take a number of ranks that divides "
        f"{lanes}, or Data(..., lanes={several})"
    )


def shared_by(widths: Widths, data: Mapping[str, Data]) -> Widths:
    """Return the numbers of ranks, within those that the user allows, that can share all data.

    Raises:
        ConfigurationError: there is none.
    """
    fitting = [
        width
        for width in range(widths.least, widths.most + 1)
        if all(each.lanes % width == 0 for each in data.values())
    ]
    if not fitting:
        name, wrong = next((name, each) for name, each in data.items() if each.lanes % widths.most)
        raise ConfigurationError(f"num_processes={widths.most}: data {name!r}: {misfit(wrong.lanes, widths.most)}")
    return Widths(fitting[0], fitting[-1])
