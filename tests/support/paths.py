"""The launch paths: a distributor of each, and what its ranks train when they are to be killed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed_trainings
import launched
import trainings

from distributor import DeepspeedTorchDistributor, TorchDistributor
from distributor.launch import Mpi, Ray, TensorFlow

PATHS = ("torchrun", "deepspeed")

#: Paths that are tried in an environment of their own, each with a package of it and its training.
OTHERS: dict[str, tuple[str, Callable[..., int | None]]] = {
    "jax": ("jax", launched.train_with_jax),
    "mpich": ("mpi4py", launched.train_with_mpi),
    "openmpi": ("mpi4py", launched.train_with_mpi),
    "mpi-env": ("mpi4py", launched.train_with_openmpis_variables),
    "ray": ("ray", launched.train_with_ray),
    "tensorflow": ("tensorflow", launched.train_with_tensorflow),
    "parameter-servers": ("tensorflow", launched.train_with_parameter_servers),
}

#: The values of paths that take more than a name.
LAUNCHES: Mapping[str, Any] = {
    "mpich": Mpi("mpich"),
    "openmpi": Mpi("openmpi"),
    "ray": Ray(object_store_memory="100m"),
    "parameter-servers": TensorFlow(parameter_servers=1, evaluator=True),
}

#: The tasks of :data:`LAUNCHES`' cluster with parameter servers, by rank, if four processes run.
TASKS = ("chief 0", "worker 0", "ps 0", "evaluator 0")


def installed() -> list[str]:
    """All paths that can be tried here: the others where they are installed, else the usual ones."""
    others = [path for path, (package, _) in OTHERS.items() if importlib.util.find_spec(package) is not None]
    return others or [*PATHS]


def distributor(path: str, num_processes: int, local: bool, **options: Any) -> TorchDistributor:
    """One for a launch path, on CPUs."""
    if path == "deepspeed":
        config = deepspeed_trainings.config(2, train_batch_size=deepspeed_trainings.BATCH * num_processes)
        return DeepspeedTorchDistributor(num_processes, 1, local, False, config, **options)
    return TorchDistributor(num_processes, local, False, launch=LAUNCHES.get(path, path), **options)


def training(path: str) -> Callable[..., int | None]:
    """Collectives on data that worker processes load; on other paths, what they have instead.

    Each rank makes a file in a folder once all of it works: see :func:`names`.
    """
    if path in OTHERS:
        return OTHERS[path][1]
    return deepspeed_trainings.train_on if path == "deepspeed" else trainings.train_on


def names(path: str, ranks: int) -> list[str]:
    """The files that the ranks of a training make."""
    if path == "parameter-servers":
        return [*TASKS]
    return ["0"] if path == "ray" else [str(rank) for rank in range(ranks)]


def values(path: str, ranks: int, steps: int) -> list[int | None]:
    """What a training returns: its number of steps, but for ranks that serve, and ranks that are not there."""
    if path == "parameter-servers":
        return [steps, None, None, steps]
    return [steps] if path == "ray" else [steps] * ranks


def least(path: str) -> int:
    """The number of ranks that a path needs."""
    return len(TASKS) if path == "parameter-servers" else 1
