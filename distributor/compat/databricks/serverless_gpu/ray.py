"""``serverless_gpu.ray``: the decorator ``ray_launch``, for a function that runs as the driver of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from distributor.compat.databricks.decorated import DistributedFunction, decorator
from distributor.compat.databricks.driver import as_driver
from distributor.compat.databricks.serverless_gpu.launching import request
from distributor.compat.databricks.types import GPUType
from distributor.launch.ray.path import Ray

P = ParamSpec("P")
T = TypeVar("T")


def ray_launch(
    gpus: int | None = None, gpu_type: GPUType | str | None = None, remote: bool | None = None
) -> Callable[[Callable[P, T]], DistributedFunction[P, T]]:
    """Decorate a function: ``function.distributed(...)`` runs it once, as the driver of a Ray cluster with GPUs.

    It has joined the cluster, which ends with it. Only the first GPU of its node is checked. A list of one is returned.

    Example:
        >>> @ray_launch(gpus=4, gpu_type="A10")
        ... def resources():
        ...     import ray
        ...     return ray.cluster_resources()
        >>> resources.distributed()[0]["GPU"]  # doctest: +SKIP
        4.0
    """
    return decorator(request("ray_launch", Ray(), gpus, gpu_type, remote), as_driver)
