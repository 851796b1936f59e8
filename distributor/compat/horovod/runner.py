"""Databricks' class ``HorovodRunner``, with the same name and arguments.

Source: https://databricks.github.io/spark-deep-learning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from distributor.compat.running import Request, run_first
from distributor.errors import ConfigurationError
from distributor.text import notices
from distributor.values.checks import one_of

T = TypeVar("T")


class HorovodRunner:
    """A runner that runs a function in many ranks, and returns rank 0's value.

    Args:
        np: number of ranks on the executors of the active Spark session. A negative number means ``-np`` ranks on this
            machine. 0, which is deprecated, means one rank for each GPU of the executors, or for each task slot if
            there are no GPUs.
        driver_log_verbosity: ``"log_callback_only"`` (default) shows the output of rank 0; ``"all"`` shows the output
            of all ranks.

    Raises:
        ConfigurationError: an argument is wrong.

    Example:
        >>> HorovodRunner(np=4).run(train, learning_rate=1e-3)  # doctest: +SKIP
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        verbosity = one_of("log_callback_only", "all")("driver_log_verbosity", driver_log_verbosity)
        self._request = request(np, "all" if verbosity == "all" else "rank0")
        self.num_processor = np

    def run(self, main: Callable[..., T], **kwargs: Any) -> T:
        """Run ``main(**kwargs)`` in all ranks, and return rank 0's value.

        Raises:
            ConfigurationError: the run is not possible, for instance because no Spark session is active; nothing was
                started.
            TrainingError: a rank failed.
        """
        if self.num_processor == 0:
            notices.logger.warning("HorovodRunner(np=0) is deprecated: pass the number of ranks")
        value: T = run_first(self._request, main, (), kwargs)
        return value


def request(np: Any, logs: str) -> Request:
    """Return what ``HorovodRunner(np=...)`` asks for: how many processes, and where.

    Args:
        np: the number of processes. A negative number means processes on this machine.
        logs: whose output is shown: ``"rank0"`` or ``"all"``.

    Raises:
        ConfigurationError: ``np`` is not a whole number.

    Example:
        >>> request(-2, "all").processes, request(-2, "all").local_mode
        (2, True)
    """
    if isinstance(np, bool) or not hasattr(np, "__index__"):
        raise ConfigurationError(f"np must be a whole number, not {np!r}")
    number = operator.index(np)
    return Request(
        asked=f"HorovodRunner(np={number})",
        parameter="np",
        processes=abs(number) or None,
        local_mode=number < 0,
        otherwise=f"pass np={-number or -2} to train on this machine",
        options={"logs": logs},
    )
