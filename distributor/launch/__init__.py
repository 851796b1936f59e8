"""Launch paths: ways to start ranks, such as torchrun's or Ray's. They describe processes, and start none themselves.

This package runs on the driver and on nodes, and may import ``machine``. Users pass an object of a launch path's class
to ``Distributor``, as the argument ``launch=``. The classes:

    from distributor.launch import Accelerate, DeepSpeed, Jax, Mpi, MpiEnv, Ray, TensorFlow, Torchrun

A path with a configuration or programs of its own has a folder, such as ``launch/ray``. Classes load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributor.launch.accelerate.launch import Accelerate as Accelerate
    from distributor.launch.deepspeed.launch import DeepSpeed as DeepSpeed
    from distributor.launch.jax.path import Jax as Jax
    from distributor.launch.mpi.env import MpiEnv as MpiEnv
    from distributor.launch.mpi.launch import Mpi as Mpi
    from distributor.launch.ray.launch import Ray as Ray
    from distributor.launch.tensorflow import TensorFlow as TensorFlow
    from distributor.launch.torchrun import Torchrun as Torchrun

_WHERE = {
    "Accelerate": "distributor.launch.accelerate.launch",
    "DeepSpeed": "distributor.launch.deepspeed.launch",
    "Jax": "distributor.launch.jax.path",
    "Mpi": "distributor.launch.mpi.launch",
    "MpiEnv": "distributor.launch.mpi.env",
    "Ray": "distributor.launch.ray.launch",
    "TensorFlow": "distributor.launch.tensorflow",
    "Torchrun": "distributor.launch.torchrun",
}

#: The strings that ``launch=`` accepts, each with the name of the class that it stands for.
NAMES = {
    "torchrun": "Torchrun",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "jax": "Jax",
    "mpi": "Mpi",
    "mpi-env": "MpiEnv",
    "ray": "Ray",
    "tensorflow": "TensorFlow",
}

__all__ = ["Accelerate", "DeepSpeed", "Jax", "Mpi", "MpiEnv", "Ray", "TensorFlow", "Torchrun"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'distributor.launch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
