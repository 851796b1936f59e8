"""The launch paths: a distributor of each, and what its ranks train when they are to be killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed_trainings
import trainings

from distributor import DeepspeedTorchDistributor, TorchDistributor

PATHS = ("torchrun", "deepspeed")


def distributor(path: str, num_processes: int, local: bool, **options: Any) -> TorchDistributor:
    """One for a launch path, on CPUs."""
    if path == "deepspeed":
        config = deepspeed_trainings.config(2, train_batch_size=deepspeed_trainings.BATCH * num_processes)
        return DeepspeedTorchDistributor(num_processes, 1, local, False, config, **options)
    return TorchDistributor(num_processes, local, False, **options)


def training(path: str) -> Callable[..., int]:
    """Collectives on data that worker processes load."""
    return deepspeed_trainings.train_on if path == "deepspeed" else trainings.train_on
