"""Reads what ``distributor sweep`` may choose from: ``--space lr=log:1e-4:1e-1``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import rich_click as click

from distributor.cli.flags import pairs
from distributor.search.space import int_range, log_uniform, uniform

_KINDS: dict[str, tuple[Callable[..., Any], Callable[[str], Any]]] = {
    "log": (log_uniform, float),
    "uniform": (uniform, float),
    "int": (int_range, int),
}


def read_space(settings: Sequence[str]) -> dict[str, Any]:
    """Return the argument ``space`` of the API.

    >>> read_space(["depth=int:1:8", "width=32,64", "kind=adam,sgd"])
    {'depth': Range(low=1, high=8, log=False, whole=True), 'width': [32, 64], 'kind': ['adam', 'sgd']}
    """
    return {name: _values(name, text) for name, text in pairs("--space", settings).items()}


def _values(name: str, text: str) -> Any:
    kind, *bounds = text.split(":")
    if len(bounds) != 2 or kind not in _KINDS:
        if ":" in text:
            raise _wrong(name, text)
        return [_value(each) for each in text.split(",")]
    make, number = _KINDS[kind]
    try:
        low, high = map(number, bounds)
    except ValueError:
        raise _wrong(name, text) from None
    return make(low, high)


def _wrong(name: str, text: str) -> click.UsageError:
    return click.UsageError(
        f"--space takes {name}=log:LOW:HIGH, {name}=uniform:LOW:HIGH, {name}=int:LOW:HIGH or {name}=A,B, not {text!r}"
    )


def _value(text: str) -> int | float | str:
    for number in (int, float):
        with suppress(ValueError):
            if str(value := number(text)) == text:  # the script gets what was written: 1.10 is a version
                return value
    return text


def read_metric(text: str) -> tuple[str, str]:
    """Return the argument ``metric`` of the API, which checks it.

    >>> read_metric("val/loss:min")
    ('val/loss', 'min')
    """
    name, _, direction = text.rpartition(":")
    if not name or direction not in ("min", "max"):
        raise click.UsageError(f"--metric takes NAME:min or NAME:max, not {text!r}")
    return name, direction
