"""Launch paths: ways to start ranks, such as torchrun's or Ray's. They describe processes, and start none themselves.

This package runs on the driver and on nodes, and may import ``machine``. Users pass an object of a launch path's class
to ``Distributor``, as the argument ``launch=``. The classes:

    from distributor.launch import Accelerate, DeepSpeed, Jax, Mpi, MpiEnv, Ray, TensorFlow, Torchrun

A path with a configuration or programs of its own has a folder, such as ``launch/ray``. Classes load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributor.launch.accelerate.path import Accelerate as Accelerate
    from distributor.launch.deepspeed.path import DeepSpeed as DeepSpeed
    from distributor.launch.jax.path import Jax as Jax
    from distributor.launch.mpi.env import MpiEnv as MpiEnv
    from distributor.launch.mpi.path import Mpi as Mpi
    from distributor.launch.ray.path import Ray as Ray
    from distributor.launch.tensorflow.path import TensorFlow as TensorFlow
    from distributor.launch.torchrun import Torchrun as Torchrun
    from distributor.values.launch_path import Launch

#: The strings that ``launch=`` accepts, each with its class.
PATHS = {
    "torchrun": "distributor.launch.torchrun:Torchrun",
    "accelerate": "distributor.launch.accelerate.path:Accelerate",
    "deepspeed": "distributor.launch.deepspeed.path:DeepSpeed",
    "jax": "distributor.launch.jax.path:Jax",
    "mpi": "distributor.launch.mpi.path:Mpi",
    "mpi-env": "distributor.launch.mpi.env:MpiEnv",
    "ray": "distributor.launch.ray.path:Ray",
    "tensorflow": "distributor.launch.tensorflow.path:TensorFlow",
}

_MODULES = {name: module for module, _, name in (where.partition(":") for where in PATHS.values())}

__all__ = ["Accelerate", "DeepSpeed", "Jax", "Mpi", "MpiEnv", "Ray", "TensorFlow", "Torchrun", "by_name"]


def by_name(name: str, **options: Any) -> Launch:
    """Return the launch path of a name in :data:`PATHS`, with its defaults except for ``options``.

    >>> by_name("mpi-env").name, by_name("tensorflow", evaluator=True)
    ('mpi-env', TensorFlow(parameter_servers=0, evaluator=True))
    """
    module, _, kind = PATHS[name].partition(":")
    path: Launch = getattr(import_module(module), kind)(**options)
    return path


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'distributor.launch' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
