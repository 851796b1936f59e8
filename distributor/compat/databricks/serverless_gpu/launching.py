"""The ``distributed`` decorator of ``serverless_gpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from distributor.compat.databricks.decorated import DistributedFunction, bare, decorator, in_words
from distributor.compat.databricks.types import GPUType, gpu_type as type_of
from distributor.compat.running import Request
from distributor.launch.torchrun import Torchrun
from distributor.values.checks import check_choice, check_count
from distributor.values.launch_path import Launch

P = ParamSpec("P")
T = TypeVar("T")


def distributed(
    gpus: int | None = None, gpu_type: GPUType | str | None = None, remote: bool | None = None
) -> Callable[[Callable[P, T]], DistributedFunction[P, T]]:
    """Decorate a function: ``function.distributed(...)`` runs it in one process per GPU, and returns all values.

    By default, in one for each available GPU; each rank checks its ``gpu_type``. ``remote=True`` trains on executors of
    the Spark session, ``False`` on this machine; by default, on executors if the session is on a cluster.

    >>> @distributed(gpus=8, gpu_type="H100")
    ... def train(learning_rate):
    ...     return learning_rate
    >>> train.distributed(1e-3)  # doctest: +SKIP
    [0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001]
    """
    return decorator(request("distributed", Torchrun(), gpus, gpu_type, remote))


def request(name: str, launch: Launch, gpus: Any, gpu_type: Any, remote: Any) -> Request:
    """Return what a decorator with these arguments asks for."""
    bare(gpus, name)
    on_executors = check_choice("remote", remote)
    return Request(
        asked=in_words(name, gpus=gpus, gpu_type=gpu_type, remote=remote),
        parameter="gpus",
        processes=None if gpus is None else check_count("gpus", gpus),
        local_mode=None if on_executors is None else not on_executors,
        otherwise="leave out remote=True to train on this machine",
        use_gpu=True,
        accelerator=type_of("gpu_type", gpu_type),
        launch=launch,
    )
