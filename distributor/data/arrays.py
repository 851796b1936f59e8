"""NumPy's arrays of Arrow's columns, and back, without pandas, which pyarrow's own conversions import.

Runs where :mod:`distributor.data.writer` does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_MOST = (1 << 31) - 1  # bytes of a column of texts


def to_numpy(column: pa.Array) -> Any:
    """Return a column's values; a view where it has numbers and no nulls."""
    kind = column.type
    if column.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return column.to_numpy(zero_copy_only=False)
    dtype = np.dtype(kind.to_pandas_dtype())
    if not len(column):
        return np.empty(0, dtype)
    return np.frombuffer(column.buffers()[1], dtype, len(column), column.offset * dtype.itemsize)


def to_arrow(values: Any, is_null: Any = None) -> pa.Array:
    """Return a column of an array of one dimension; it shares the memory of contiguous numbers.

    ``is_null`` tells which rows have no value.
    """
    kind, valid = values.dtype.kind, None if is_null is None else _bits(~is_null)
    if kind == "b":
        return pa.Array.from_buffers(pa.bool_(), len(values), [valid, _bits(values)])
    if kind == "U" and is_null is None:
        return texts(values.tolist())
    if kind not in "iuf" or not values.dtype.isnative:
        return pa.array(values, mask=is_null)
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, buffer])


def texts(values: Sequence[str | None]) -> pa.Array:
    """Return a column of texts; ``None`` is null."""
    parts = [b"" if each is None else each.encode() for each in values]
    ends: Any = np.cumsum([0, *map(len, parts)])
    if ends[-1] > _MOST:
        return pa.array(values, pa.string())
    valid = _bits(np.array([each is not None for each in values], bool))
    buffers = [valid, pa.py_buffer(ends.astype("int32")), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.string(), len(parts), buffers)


def _bits(flags: Any) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
