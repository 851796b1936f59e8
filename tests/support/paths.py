"""The launch paths: a distributor of each, and what its ranks train when they are to be killed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import deepspeed_trainings
import launched
import trainings

from distributor import DeepspeedTorchDistributor, TorchDistributor
from distributor.launch import Ray, TensorFlow

PATHS = ("torchrun", "deepspeed")

#: Paths whose packages have an environment of their own, each with its package and its training.
OTHERS: dict[str, tuple[str, Callable[..., int | None]]] = {
    "jax": ("jax", launched.train_with_jax),
    "mpi": ("mpi4py", launched.train_with_mpi),
    "ray": ("ray", launched.train_with_ray),
    "tensorflow": ("tensorflow", launched.train_with_tensorflow),
}


def installed() -> list[str]:
    """All paths that can be tried here: the others where they are installed, else the usual ones."""
    others = [path for path, (package, _) in OTHERS.items() if importlib.util.find_spec(package) is not None]
    return others or [*PATHS]


def distributor(path: str, num_processes: int, local: bool, **options: Any) -> TorchDistributor:
    """One for a launch path, on CPUs."""
    if path == "deepspeed":
        config = deepspeed_trainings.config(2, train_batch_size=deepspeed_trainings.BATCH * num_processes)
        return DeepspeedTorchDistributor(num_processes, 1, local, False, config, **options)
    launch: Any = {
        "ray": Ray(object_store_memory="100m"),
        "tensorflow": TensorFlow(parameter_servers=int(num_processes > 2)),
    }.get(path, path)
    return TorchDistributor(num_processes, local, False, launch=launch, **options)


def training(path: str) -> Callable[..., int | None]:
    """Collectives on data that worker processes load; on other paths, what they have instead."""
    if path in OTHERS:
        return OTHERS[path][1]
    return deepspeed_trainings.train_on if path == "deepspeed" else trainings.train_on


def values(path: str, ranks: int, steps: int) -> list[int | None]:
    """What a training returns: its number of steps, but for ranks that serve, and ranks that are not there."""
    if path == "ray":
        return [steps]
    return [steps, *[None] * (ranks - 1)] if path == "tensorflow" and ranks > 2 else [steps] * ranks
