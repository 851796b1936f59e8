"""The functions that Databricks' decorators return. Their method ``distributed`` runs them in many processes."""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar

from distributor.api.target import check_call
from distributor.compat.running import Request, run_all
from distributor.errors import ConfigurationError
from distributor.text import notices

P = ParamSpec("P")
T = TypeVar("T")

#: Environment variables with which notebooks choose one of Databricks' pools of GPUs. Source:
#: https://api-docs.databricks.com/python/serverless_gpu/overview.html
POOLS = ("DATABRICKS_USE_RESERVED_GPU_POOL", "DATABRICKS_REMOTE_GPU_POOL_ID")


class DistributedFunction(Generic[P, T]):
    """A function that also runs in many processes: ``function.distributed(*args, **kwargs)``.

    A plain call runs the function once, in this process, as if it were not decorated.
    """

    def __init__(self, function: Callable[P, T], request: Request, target: Callable[P, T]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._request = request
        self._target = target

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._function(*args, **kwargs)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run the function in all processes, and return their values in rank order; with ``ray_launch``, one value.

        Raises:
            ConfigurationError: an argument is wrong, or the run is not possible; nothing was started.
            ResourceError: there are fewer GPUs than requested.
            TrainingError: a rank failed, for instance because its GPU is of another type.
        """
        check_call(self._function, args, kwargs)  # a wrapper, such as that of ``ray_launch``, takes any arguments
        for pool in pools_set(os.environ):
            notices.logger.warning(
                "%s is set, but there are no pools here: %s trains on the executors of the Spark session, or on this "
                "machine",
                pool,
                self._request.asked,
            )
        variables = carried(os.environ)
        options = {**self._request.options, **({"env": variables} if variables else {})}
        return run_all(replace(self._request, options=options), self._target, args, kwargs)


def decorator(
    request: Request, prepare: Callable[[Any], Any] = lambda function: function
) -> Callable[[Callable[P, T]], DistributedFunction[P, T]]:
    """Return a decorator that makes what ``prepare`` returns for a function run in the processes of ``request``."""

    def decorate(function: Callable[P, T]) -> DistributedFunction[P, T]:
        if not callable(function):
            raise ConfigurationError(f"{request.asked} decorates a function, not {function!r}")
        return DistributedFunction(function, request, prepare(function))

    return decorate


def bare(function: Any, name: str) -> None:
    """ConfigurationError if a decorator was used without parentheses: its first argument is the function then."""
    if callable(function) and not isinstance(function, type):
        raise ConfigurationError(f"@{name} needs parentheses: write @{name}() above {function.__qualname__}")


def pools_set(environ: Mapping[str, str]) -> list[str]:
    """Return which of :data:`POOLS` are set.

    >>> pools_set({"DATABRICKS_REMOTE_GPU_POOL_ID": "7", "HOME": "/root"})
    ['DATABRICKS_REMOTE_GPU_POOL_ID']
    """
    return [name for name in POOLS if environ.get(name)]


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the notebook's MLflow variables, with which ranks log to the notebook's MLflow run.

    >>> carried({"MLFLOW_RUN_ID": "7", "HOME": "/root"})
    {'MLFLOW_RUN_ID': '7'}
    """
    return {name: value for name, value in environ.items() if name.startswith("MLFLOW_")}


def in_words(name: str, **given: Any) -> str:
    """Return a decorator call as a user would write it.

    >>> in_words("distributed", gpus=8, gpu_type=None)
    '@distributed(gpus=8)'
    """
    words = [
        f"{key}={value if isinstance(value, enum.Enum) else repr(value)}"
        for key, value in given.items()
        if value is not None
    ]
    return f"@{name}({', '.join(words)})"
