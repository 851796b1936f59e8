"""What a search may choose from, by the names of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributor.errors import ConfigurationError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    log: bool = False  # chosen evenly on a logarithmic scale
    whole: bool = False

    def __post_init__(self) -> None:
        for bound in (self.low, self.high):
            if isinstance(bound, bool) or not isinstance(bound, int if self.whole else (int, float)):
                raise ConfigurationError(f"a range needs two {'whole ' * self.whole}numbers, not {bound!r}")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ConfigurationError(
                f"a range goes from a lower to a higher number, not from {self.low} to {self.high}"
            )
        if self.log and self.low <= 0:
            raise ConfigurationError(f"log_uniform needs numbers above 0, not {self.low}")


def uniform(low: float, high: float) -> Range:
    """Let a search choose a number from ``low`` to ``high``.

    Example:
        >>> uniform(0, 0.5)
        Range(low=0, high=0.5, log=False, whole=False)
    """
    return Range(low, high)


def log_uniform(low: float, high: float) -> Range:
    """Let a search choose a number from ``low`` to ``high`` on a logarithmic scale, such as a learning rate."""
    return Range(low, high, log=True)


def int_range(low: int, high: int) -> Range:
    """Let a search choose a whole number from ``low`` to ``high``, both included."""
    return Range(low, high, whole=True)


def distributions(space: Mapping[str, Any]) -> dict[str, BaseDistribution]:
    """Return Optuna's distribution of each parameter."""
    if not isinstance(space, Mapping) or not space:
        raise ConfigurationError(f"space must be a dict such as {{'lr': log_uniform(1e-4, 1e-1)}}, not {space!r}")
    return {name: _distribution(name, values) for name, values in space.items()}


def _distribution(name: str, values: Any) -> BaseDistribution:
    from optuna import distributions

    if not isinstance(name, str) or re.fullmatch(r"[^\W\d][\w.-]*", name) is None:  # a script's may be learning-rate
        raise ConfigurationError(f"space: {name!r} is not the name of a parameter")
    match values:
        case Range(whole=True):
            return distributions.IntDistribution(int(values.low), int(values.high))
        case Range():
            return distributions.FloatDistribution(values.low, values.high, log=values.log)
        case list() | tuple():
            plain = [each.item() if getattr(each, "shape", None) == () else each for each in values]  # scalars of NumPy
            if plain and all(isinstance(each, (str, int, float, type(None))) for each in plain):
                return distributions.CategoricalDistribution(plain)
    raise ConfigurationError(
        f"space: {name} must be uniform(low, high), log_uniform(low, high), int_range(low, high), or a list of texts "
        f"and numbers to choose from, not {values!r}"
    )


def suggest(trial: Trial, space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Let a trial choose the parameters that it lacks, and return all as the next driver will find them in a storage.

    ValueError: Optuna does not allow what is to be chosen.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    chosen = trial.params
    for name in (each for each in space if each not in chosen):
        match space[name]:
            case FloatDistribution(low=low, high=high, log=log):
                trial.suggest_float(name, low, high, log=log)
            case IntDistribution(low=low, high=high):
                trial.suggest_int(name, low, high)
            case CategoricalDistribution(choices=choices):
                trial.suggest_categorical(name, choices)
    params = trial.params
    return {
        name: each.to_external_repr(each.to_internal_repr(params[name])) for name, each in trial.distributions.items()
    }


def is_changed(before: BaseDistribution, now: BaseDistribution) -> bool:
    """Whether Optuna refuses to go on with a parameter: only the bounds of numbers may change."""
    if type(before) is not type(now) or hasattr(now, "choices"):
        return bool(before != now)
    return bool(before.log != now.log)
