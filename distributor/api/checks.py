"""Checks of individual arguments."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distributor import launch as names
from distributor.errors import ConfigurationError
from distributor.machine import limits
from distributor.values.environment import CONTRACT
from distributor.values.launch import Launch

#: Maximum number of characters in a run's name.
_LONGEST_NAME = 100


#: Minimum number of bytes of memory; a smaller number was probably meant in another unit.
_LEAST_MEMORY = 1_000_000


#: A year, in seconds. A longer time is a mistake, and clocks may overflow when they add it.
_LONGEST = 366 * 24 * 3600.0


def check_count(name: str, value: Any) -> int:
    """Return a positive integer, or raise a ``ConfigurationError``."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ConfigurationError(f"{name} has to be a positive integer, not {value!r}")
    return operator.index(value)


def check_name(name: Any) -> str | None:
    """Return a run's name without surrounding blanks, or raise a ``ConfigurationError``."""
    if name is None:
        return None
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigurationError(f"name must be one line of text, not {name!r}")
    if len(name) > _LONGEST_NAME:
        raise ConfigurationError(f"name must have at most {_LONGEST_NAME} characters, not {len(name):,}: shorten it")
    return name.strip()


def check_seconds(name: str, seconds: Any, least: float) -> float:
    """Return a number of seconds from ``least`` to a year, or raise a ``ConfigurationError``."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not least <= seconds <= _LONGEST:
        raise ConfigurationError(f"{name} has to be a number of seconds from {least} to a year, not {seconds!r}")
    return float(seconds)


def check_memory(size: Any) -> int:
    """Return a size in bytes, or raise a ``ConfigurationError``."""
    try:
        number = limits.parse_memory(size) if isinstance(size, str) else check_count("memory_per_process", size)
    except ValueError:
        number = 0
    if number < _LEAST_MEMORY:
        raise ConfigurationError(
            f"memory_per_process has to be a size as '8g' or a number of bytes, a million at least, not {size!r}"
        )
    return number


def check_flag(name: str, value: Any) -> bool:
    """Return ``True`` or ``False``, or raise a ``ConfigurationError``."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} has to be True or False, not {value!r}")
    return value


def check_path(name: str, value: Any) -> Path | None:
    """Return the path of a folder, or raise a ``ConfigurationError``."""
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"{name} has to be the path of a folder, not {value!r}")
    return None if value is None else Path(value)


def check_patterns(patterns: Any) -> tuple[str, ...]:
    """Return patterns for variable names, or raise a ``ConfigurationError``."""
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise ConfigurationError(f"forward_env has to be a list of patterns such as ['WANDB_*'], not {patterns!r}")
    listed = tuple(patterns)
    for pattern in listed:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"forward_env has to list patterns such as 'WANDB_*', not {pattern!r}")
    return listed


def check_env(env: Any) -> dict[str, str]:
    """Return environment variables for ranks, or raise a ``ConfigurationError``."""
    if not isinstance(env, Mapping):
        raise ConfigurationError(f"env has to be a dict such as {{'SEED': '1'}}, not a {type(env).__name__}")
    for name, value in env.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"env has to map strings to strings; the name {name!r} is none")
        kind = type(value).__name__
        if not isinstance(value, str):  # not shown, since the value may be a secret
            raise ConfigurationError(f"env has to map strings to strings; the value of {name!r} is of type {kind}")
        if not name or "=" in name or "\0" in name + value:
            raise ConfigurationError(
                f"env names a variable that cannot be: {name!r} is empty or holds '=' or a NUL byte"
            )
        if name in CONTRACT:
            raise ConfigurationError(f"env sets {name}, which the run decides for each rank: leave it out")
    return dict(env)


def check_logs(logs: Any, num_processes: int) -> tuple[int, ...] | None:
    """Return the ranks whose lines are shown, ``None`` for all, or raise a ``ConfigurationError``."""
    named: dict[str, tuple[int, ...] | None] = {"all": None, "rank0": (0,), "none": ()}
    if isinstance(logs, str) and logs in named:
        return named[logs]
    if isinstance(logs, str) or not isinstance(logs, Iterable):
        raise ConfigurationError(f"logs has to be 'all', 'rank0', 'none' or a list of ranks, not {logs!r}")
    ranks = tuple(logs)
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise ConfigurationError(f"logs has to list ranks as numbers, not {rank!r}")
        if not 0 <= rank < num_processes:
            raise ConfigurationError(
                f"logs names rank {rank!r}; with num_processes={num_processes} there are 0 to {num_processes - 1}"
            )
    return ranks


def check_ports(ports: Any) -> tuple[int, int] | None:
    """Return the first and the last port, or raise a ``ConfigurationError``."""
    if ports is None:
        return None
    try:
        first, last = (operator.index(port) for port in ports)
    except (TypeError, ValueError):
        first, last = 0, -1
    if not 1 <= first <= last <= 65535:
        raise ConfigurationError(f"driver_ports has to be the first and the last of some ports, not {ports!r}")
    return first, last


def is_module_name(name: Any) -> bool:
    """Return whether ``python -m`` accepts a name."""
    return isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) and not name.endswith(".py")


def check_preload(names: Any) -> tuple[str, ...]:
    """Return the names of modules, or raise a ``ConfigurationError``."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigurationError(f"preload has to be a list of module names, not {names!r}")
    modules = tuple(names)
    for name in modules:
        if not is_module_name(name):
            raise ConfigurationError(f"preload has to name modules such as 'transformers', not {name!r}")
    return modules


def check_launch(launch: Any) -> Launch:
    """Return a launch path, given as a value or by its name, or raise a ``ConfigurationError``."""
    if isinstance(launch, str) and launch in names.NAMES:
        found: Launch = getattr(names, names.NAMES[launch])()
        return found
    if isinstance(launch, str) or not callable(getattr(launch, "resolve", None)) or isinstance(launch, type):
        raise ConfigurationError(
            f"launch must be {' or '.join(map(repr, names.NAMES))} or a launch path such as "
            f"distributor.launch.DeepSpeed(config), not {launch!r}"
        )
    valid: Launch = launch
    return valid
