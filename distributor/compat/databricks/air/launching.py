"""The decorators of ``databricks.air``, and ``ray_init``, which joins a run's Ray cluster."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from distributor.compat.databricks.decorated import DistributedFunction, bare, decorator, in_words
from distributor.compat.databricks.driver import as_driver
from distributor.compat.databricks.types import accelerator
from distributor.compat.running import Request
from distributor.errors import ConfigurationError
from distributor.launch.ray.path import Ray
from distributor.launch.torchrun import Torchrun
from distributor.values.checks import check_count
from distributor.values.launch_path import Launch

P = ParamSpec("P")
T = TypeVar("T")


def distributed(
    num_accelerators: int | None = None, accelerator_type: str | None = None
) -> Callable[[Callable[P, T]], DistributedFunction[P, T]]:
    """Decorate a function: ``function.distributed(...)`` runs it in one process per GPU, and returns all values.

    By default, on the GPUs in ``accelerator_type``, such as ``"GPU_8xH100"``, or on all. Each rank checks its own GPU.

    >>> @distributed(num_accelerators=2, accelerator_type="GPU_8xH100")
    ... def train():
    ...     return 7
    >>> train.distributed()  # doctest: +SKIP
    [7, 7]
    """
    return decorator(request("distributed", Torchrun(), num_accelerators, accelerator_type))


def ray_launch(
    num_accelerators: int | None = None, accelerator_type: str | None = None
) -> Callable[[Callable[P, T]], DistributedFunction[P, T]]:
    """Decorate a function: ``function.distributed(...)`` runs it once, as the driver of a Ray cluster with GPUs.

    It has joined the cluster, which ends with it. Only the first GPU of its node is checked. A list of one is returned.

    Example:
        >>> @ray_launch(num_accelerators=4)
        ... def resources():
        ...     import ray
        ...     return ray.cluster_resources()
        >>> resources.distributed()[0]["GPU"]  # doctest: +SKIP
        4.0
    """
    return decorator(request("ray_launch", Ray(), num_accelerators, accelerator_type), as_driver)


def request(name: str, launch: Launch, num_accelerators: Any, accelerator_type: Any) -> Request:
    """Return what a decorator with these arguments asks for.

    >>> request("distributed", Torchrun(), None, "GPU_8xH100").processes
    8
    """
    bare(num_accelerators, name)
    wanted = accelerator("accelerator_type", accelerator_type)
    number = None if num_accelerators is None else check_count("num_accelerators", num_accelerators)
    return Request(
        asked=in_words(name, num_accelerators=num_accelerators, accelerator_type=accelerator_type),
        parameter="num_accelerators",
        processes=wanted.number if number is None and wanted is not None else number,
        use_gpu=True,
        accelerator=None if wanted is None else wanted.type,
        launch=launch,
    )


def ray_init(*args: Any, **kwargs: Any) -> Any:
    """Join the run's Ray cluster, in a function decorated with :func:`ray_launch`.

    >>> ray_init()  # doctest: +SKIP
    """
    if "RAY_ADDRESS" not in os.environ or "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ConfigurationError(
            "ray_init() joins the Ray cluster of a run, but this process does not belong to such a run: call it "
            "inside a function decorated with @ray_launch. For a cluster that outlives the function, use "
            "ray.util.spark.setup_ray_cluster"
        )
    return importlib.import_module("ray").init(*args, **kwargs)
