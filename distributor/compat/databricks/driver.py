"""For ``ray_launch``: the rank that runs the user's function joins the run's Ray cluster first.

Public notebooks use ``ray.cluster_resources()`` and ``ray.data`` in such functions without ``ray.init()``: those that
embed sequences in https://github.com/databricks-industry-solutions/genesis-workbench.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def as_driver(function: Callable[P, T]) -> Callable[P, T]:
    """Return a wrapper that joins the run's Ray cluster and calls the function. Later calls of ``ray.init`` do nothing.

    >>> as_driver(len).__name__
    'len'
    """

    @functools.wraps(function)
    def driver(*args: P.args, **kwargs: P.kwargs) -> T:
        ray: Any = importlib.import_module("ray")
        ray.init = functools.partial(ray.init, ignore_reinit_error=True)
        ray.init()
        return function(*args, **kwargs)

    return driver
