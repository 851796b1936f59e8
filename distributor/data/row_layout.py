"""How the numbers of a row stand side by side in a file: one read brings all of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distributor.data.manifest import Field


def stored(dtype: str) -> Any:
    """Return the type in the file: Arrow packs eight booleans into a byte, which a tensor cannot read."""
    return np.dtype("uint8" if dtype == "bool" else dtype)


def row_type(fields: Sequence[Field]) -> Any:
    """Return a structured type of the fields of numbers, by their positions; the largest elements come first."""
    numbers = [(str(position), each) for position, each in enumerate(fields) if each.kind == "number"]
    numbers.sort(key=lambda named: -stored(named[1].dtype).itemsize)
    formats = [(stored(each.dtype), () if each.width is None else (each.width,)) for _, each in numbers]
    offsets, size = [], 0
    for element, shape in formats:
        offsets.append(size)
        size += np.dtype((element, shape)).itemsize
    most = max((element.itemsize for element, _ in formats), default=1)
    names = [name for name, _ in numbers]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": -(-size // most) * most})
