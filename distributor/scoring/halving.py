"""Calls a function of rows, and finds the rows at fault. It travels into Spark's workers by value."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from distributor.text.wording import printable

T = TypeVar("T")

#: Folders of this package: a project of users may be named like all of it.
_OURS = ("/distributor/scoring/", "/distributor/checkpoint/", "/distributor/shipping/")


def halved(call: Callable[[int, int], T], first: int, last: int, failed: dict[int, str], *, all_rows: bool) -> list[T]:
    """Call a function for rows together; if it raises, in halves, down to the rows at fault, whose errors are noted.

    Unless ``all_rows`` are wanted, the first row at fault is enough.
    """
    try:
        return [call(first, last)]
    except (Exception, SystemExit) as error:
        if last - first == 1:
            failed[first] = described(error)
            return []
    middle = (first + last) // 2
    done = halved(call, first, middle, failed, all_rows=all_rows)
    return done if failed and not all_rows else done + halved(call, middle, last, failed, all_rows=all_rows)


def described(error: BaseException) -> str:
    """Return an error with the user's line in which it was raised."""
    whole = traceback.extract_tb(error.__traceback__)
    frames = [each for each in whole if not any(folder in each.filename for folder in _OURS)]
    users = [each for each in frames if "/site-packages/" not in each.filename] or frames
    where = f" ({users[-1].filename}, line {users[-1].lineno}, in {users[-1].name})" if users else ""
    try:
        text = str(error)
    except Exception as another:  # the user's class raises
        text = f"its text cannot be made: {type(another).__name__}"
    return printable(f"{type(error).__name__}: {text}{where}")


def copied(value: Any) -> Any:
    """Return arrays, also those in lists, as copies that have their memory in the same order."""
    if isinstance(value, list):
        return [copied(each) for each in value]
    return value.copy("K") if isinstance(value, np.ndarray) else value


def joined(values: list[Any]) -> Any:
    """Return the rows of several arrays or lists as one."""
    arrays = all(isinstance(each, np.ndarray) for each in values)
    if values and arrays and len({each.shape[1:] for each in values}) == 1:
        return values[0] if len(values) == 1 else np.concatenate(values)
    return [row for each in values for row in each]
