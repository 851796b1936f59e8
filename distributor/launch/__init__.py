"""Launch paths: ways to start ranks, such as torchrun's or Ray's. They describe processes, and start none themselves.

This package runs on the driver and on nodes, and may import ``machine``. Users pass an object of a launch path's class
to ``Distributor``, as the argument ``launch=``. The classes:

    from distributor.launch import Accelerate, DeepSpeed, Jax, Mpi, MpiEnv, Ray, TensorFlow, Torchrun

A path with a configuration or programs of its own has a folder, such as ``launch/ray``. Classes load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distributor.launch.registry import PATHS

if TYPE_CHECKING:
    from distributor.launch.accelerate.path import Accelerate as Accelerate
    from distributor.launch.deepspeed.path import DeepSpeed as DeepSpeed
    from distributor.launch.jax.path import Jax as Jax
    from distributor.launch.mpi.env import MpiEnv as MpiEnv
    from distributor.launch.mpi.path import Mpi as Mpi
    from distributor.launch.ray.path import Ray as Ray
    from distributor.launch.tensorflow.path import TensorFlow as TensorFlow
    from distributor.launch.torchrun import Torchrun as Torchrun

_MODULES = {name: module for module, _, name in (where.partition(":") for where in PATHS.values())}

__all__ = ["Accelerate", "DeepSpeed", "Jax", "Mpi", "MpiEnv", "Ray", "TensorFlow", "Torchrun"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'distributor.launch' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
