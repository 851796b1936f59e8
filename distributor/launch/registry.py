"""The launch paths by their names: the one place that lists them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def by_name(name: str, **options: Any) -> Launch:
    """Return the launch path of a name in :data:`PATHS`, with its defaults except for ``options``.

    >>> by_name("mpi-env").name, by_name("tensorflow", evaluator=True)
    ('mpi-env', TensorFlow(parameter_servers=0, evaluator=True))
    """
    module, _, kind = PATHS[name].partition(":")
    path: Launch = getattr(import_module(module), kind)(**options)
    return path
