"""Checks of single values that users give.

A check is called with an option's name and its value. It returns the value to keep, or raises a ``ConfigurationError``
that names the option, its value and what is valid. A value that a check has returned passes the same check unchanged.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from distributor.errors import ConfigurationError
from distributor.text.wording import parse_memory
from distributor.values.environment import CONTRACT

Check = Callable[[str, Any], Any]

#: The beginning of ``Path("s3://bucket/run")`` or ``dbfs:/run``, which would be a folder below the current one.
_ONE_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)", re.IGNORECASE)

#: Maximum number of characters in a run's name.
_LONGEST_NAME = 100

#: Minimum number of bytes of memory; a smaller number was probably meant in another unit.
_LEAST_MEMORY = 1_000_000

#: Maximum time limit in seconds: a year. A longer one is a mistake, and may overflow when it is added to a clock.
_LONGEST = 366 * 24 * 3600.0


def optional(check: Check) -> Check:
    """Return a check that also accepts ``None``, for an option that need not be given."""
    return lambda name, value: None if value is None else check(name, value)


def one_of(*choices: str) -> Check:
    """Return a check that accepts only the given words."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ConfigurationError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")
        return value

    return check


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Check that a value is an integer of at least ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ConfigurationError(f"{name} must be {wanted}, not {value!r}")
    return operator.index(value)


def check_range(name: str, value: Any) -> tuple[int, int]:
    """Check a pair of positive integers, the lower one first. One integer ``n`` is accepted too, as ``(n, n)``."""
    if not isinstance(value, (tuple, list)):
        count = check_count(name, value)
        return count, count
    if len(value) != 2:
        raise ConfigurationError(f"{name} must be a number or a pair such as (4, 16), not {value!r}")
    least, most = (check_count(f"each number of {name}", number) for number in value)
    if least > most:
        raise ConfigurationError(f"{name}={value!r} must have the lower number first")
    return least, most


def check_gpus(name: str, value: Any) -> int:
    """Check that a value is a positive integer. For a fraction, the error says why ranks cannot share a GPU."""
    if isinstance(value, float) and not value.is_integer():
        raise ConfigurationError(
            f"{name} must be a whole number, not {value!r}: ranks cannot share a GPU (NCCL refuses two ranks on one "
            "device)"
        )
    return check_count(name, value)


def check_title(name: str, value: Any) -> str:
    """Check that a value is one line of text. Return it without the blanks around it."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ConfigurationError(f"{name} must be one line of text, not {value!r}")
    if len(value) > _LONGEST_NAME:
        raise ConfigurationError(f"{name} must have at most {_LONGEST_NAME} characters, not {len(value):,}: shorten it")
    return value.strip()


def check_seconds(name: str, seconds: Any, least: float) -> float:
    """Check that a value is a number of seconds from ``least`` to a year."""
    number = None if isinstance(seconds, bool) else as_number(seconds)
    if number is None or not least <= number <= _LONGEST:
        raise ConfigurationError(f"{name} must be a number of seconds from {least} to a year, not {seconds!r}")
    return float(number)


def check_memory(name: str, size: Any) -> int:
    """Check a number of bytes, or a size as text such as ``"8g"``. Return the number of bytes."""
    try:
        number = parse_memory(size) if isinstance(size, str) else check_count(name, size)
    except ValueError:
        number = 0
    if number < _LEAST_MEMORY:
        raise ConfigurationError(
            f"{name} must be a size such as '8g' or a number of bytes, and at least a million bytes, not {size!r}"
        )
    return number


def as_number(value: Any) -> int | float | None:
    """Return a number, or a tensor or array of one element, as a Python number; ``None`` for anything else."""
    try:
        if callable(getattr(value, "item", None)):
            value = value.item()
        if isinstance(value, numbers.Real):
            return int(value) if isinstance(value, numbers.Integral) else float(value)
        if hasattr(value, "__float__"):  # a Decimal, or a tensor of TensorFlow, which has no item()
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor or array of several elements
        pass
    return None


def as_whole(value: Any) -> int | None:
    """Return a value as an ``int`` if :func:`as_number` finds a whole number in it, otherwise ``None``.

    >>> as_whole(3.0), as_whole(0.5), as_whole(float("nan")), as_whole("3")
    (3, None, None, None)
    """
    number = as_number(value)
    return int(number) if number is not None and math.isfinite(number) and number == int(number) else None


def check_flag(name: str, value: Any) -> bool:
    """Check that a value is a flag: ``True``, ``False``, 0, 1 or a NumPy bool. Return the flag as a bool."""
    flag = _as_flag(value)
    if flag is None:
        raise ConfigurationError(f"{name} must be True or False, not {value!r}")
    return flag


def check_choice(name: str, value: Any) -> bool | None:
    """Check that a value is ``None``, or one that :func:`check_flag` accepts. Return ``None`` or a bool."""
    flag = _as_flag(value)
    if value is not None and flag is None:
        raise ConfigurationError(f"{name} must be True, False or None, not {value!r}")
    return flag


def _as_flag(value: Any) -> bool | None:
    is_numpys = (type(value).__module__, type(value).__name__) in (("numpy", "bool"), ("numpy", "bool_"))
    if is_numpys or (hasattr(value, "__index__") and not hasattr(value, "__len__") and value in (0, 1)):
        return bool(value)
    return None


def check_path(name: str, value: Any) -> Path:
    """Check the path of a folder. The folder need not exist."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"{name} must be the path of a folder, not {value!r}")
    return Path(value)


def check_place(name: str, value: Any) -> str:
    """Check the path of a folder, or a URL such as ``s3://bucket/run``. The folder need not exist."""
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.strip()):
        place = str(os.fspath(value))
        if _ONE_SLASH.match(place):
            raise ConfigurationError(
                f"{name} is {place!r}, which is neither a path nor a URL: pass a URL as text with two slashes, such as "
                "'s3://bucket/run', or the path under which it is mounted, such as '/dbfs/run'"
            )
        return place
    raise ConfigurationError(f"{name} must be the path of a folder or a URL such as 's3://bucket/run', not {value!r}")


def check_patterns(name: str, patterns: Any) -> tuple[str, ...]:
    """Check a list of patterns for the names of environment variables, such as ``WANDB_*``."""
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise ConfigurationError(f"{name} must be a list of patterns such as ['WANDB_*'], not {patterns!r}")
    listed = tuple(patterns)
    for pattern in listed:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"{name} must list patterns such as 'WANDB_*', not {pattern!r}")
    return listed


def check_env(name: str, env: Any) -> dict[str, str]:
    """Check a dict of environment variables for ranks. Errors do not show the values, since they may be secrets."""
    if not isinstance(env, Mapping):
        raise ConfigurationError(f"{name} must be a dict such as {{'SEED': '1'}}, not {type(env).__name__}")
    for variable, value in env.items():
        if not isinstance(variable, str):
            raise ConfigurationError(f"{name} must map strings to strings, but the name {variable!r} is not a string")
        kind = type(value).__name__
        if not isinstance(value, str):
            raise ConfigurationError(
                f"{name} must map strings to strings, but the value of {variable!r} is of type {kind}"
            )
        if not variable or "=" in variable or "\0" in variable + value:
            raise ConfigurationError(
                f"{name} cannot set the variable {variable!r}: its name is empty or contains '=', or its name or value "
                "contains a NUL byte"
            )
        if variable in CONTRACT:
            raise ConfigurationError(f"{name} sets {variable}, which the run sets for each rank: leave it out")
    return dict(env)


def check_logs(name: str, logs: Any) -> Literal["all"] | tuple[int, ...]:
    """Check ``logs=``: ``"all"``, ``"rank0"``, ``"none"`` or a list of ranks. Return ``"all"`` or the ranks."""
    if isinstance(logs, str) and logs in ("all", "rank0", "none"):
        return "all" if logs == "all" else (0,) if logs == "rank0" else ()
    if isinstance(logs, str) or not isinstance(logs, Iterable):
        raise ConfigurationError(f"{name} must be 'all', 'rank0', 'none' or a list of ranks, not {logs!r}")
    ranks = tuple(logs)
    for rank in ranks:
        if isinstance(rank, bool) or not hasattr(rank, "__index__"):
            raise ConfigurationError(f"{name} must list ranks as numbers, not {rank!r}")
    return tuple(map(operator.index, ranks))


def check_ports(name: str, ports: Any) -> tuple[int, int]:
    """Check a range of ports, given as its first and its last port."""
    try:
        first, last = (operator.index(port) for port in ports)
    except (TypeError, ValueError):
        first, last = 0, -1
    if not 1 <= first <= last <= 65535:
        raise ConfigurationError(
            f"{name} must be two ports from 1 to 65535, the first and the last of a range such as (7000, 7100), not "
            f"{ports!r}"
        )
    return first, last


def check_modules(name: str, names: Any) -> tuple[str, ...]:
    """Check a list of names of modules."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigurationError(f"{name} must be a list of module names, not {names!r}")
    modules = tuple(names)
    for module in modules:
        if not is_module_name(module):
            raise ConfigurationError(f"{name} must name modules such as 'transformers', not {module!r}")
    return modules


def is_module_name(name: Any) -> bool:
    """Return whether ``python -m`` accepts a name."""
    return isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) and not name.endswith(".py")
