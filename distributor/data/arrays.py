"""NumPy's arrays of Arrow's numbers, and back, without pandas, which pyarrow's own conversions import.

Runs where :mod:`distributor.data.writer` does.
"""

from typing import Any

import numpy as np
import pyarrow as pa


def to_numpy(column: pa.Array) -> Any:
    """Return a column's values; a view where it has numbers and no nulls."""
    kind = column.type
    if column.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return column.to_numpy(zero_copy_only=False)
    dtype = np.dtype(kind.to_pandas_dtype())
    if not len(column):
        return np.empty(0, dtype)
    return np.frombuffer(column.buffers()[1], dtype, len(column), column.offset * dtype.itemsize)


def to_arrow(values: Any) -> pa.Array:
    """Return a column of an array of one dimension; it shares the memory of contiguous numbers."""
    if values.dtype.kind not in "iuf" or not values.dtype.isnative:
        return pa.array(values)
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])
