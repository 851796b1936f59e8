"""The default process group, as functions use it that send flags and other small values from rank to rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device() -> torch.device:
    """Return a device whose tensors the default process group can send: the CPU if possible, else this rank's own.

    A group that was made without a ``backend`` serves only the accelerator, and ``get_backend()`` is ``"undefined"``.
    """
    import torch
    import torch.distributed as dist

    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        return bound
    of_kind, own = getattr(torch, kinds[0]), int(os.environ.get("LOCAL_RANK", 0))
    # A rank that has chosen no device has device 0, which another rank may use.
    return torch.device(kinds[0], of_kind.current_device() or (own if own < of_kind.device_count() else 0))
