"""Compute the interval between saves at which training loses the least time."""

from __future__ import annotations

import math

from distributor.errors import ConfigurationError


def suggest_checkpoint_interval(failures_per_day: float, save_seconds: float) -> float:
    """Return the number of seconds between saves; see :func:`distributor.runtime.suggest_checkpoint_interval`.

    >>> round(suggest_checkpoint_interval(failures_per_day=2, save_seconds=5))
    654
    """
    for name, value in (("failures_per_day", failures_per_day), ("save_seconds", save_seconds)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigurationError(f"{name} must be a number greater than 0, not {value!r}")
    between, cost = 86400.0 / failures_per_day, float(save_seconds)
    if cost >= 2 * between:
        return between
    part = math.sqrt(cost / (2 * between))
    return math.sqrt(2 * cost * between) * (1 + part / 3 + part * part / 9) - cost
