"""GPU types: their names, and the check in each rank that its GPU is of the requested type."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, cast

from distributor.errors import ConfigurationError
from distributor.rank.gpus import in_fork
from distributor.values.launch_path import Launch, LaunchPath
from distributor.values.plan import Call, Plan, Site

#: The models of a GPU type. AWS offers A10G where other clouds offer A10.
_SOLD_AS = {"A10": ("A10", "A10G")}


def is_a(accelerator: str, device: str) -> bool:
    """Return whether a device, by the name that torch gives it, is of a GPU type.

    >>> is_a("h100", "NVIDIA H100 80GB HBM3"), is_a("A10", "NVIDIA A10G"), is_a("A10", "NVIDIA A100-SXM4-40GB")
    (True, True, False)
    """
    wanted = accelerator.upper()
    words = re.split(r"[\s_-]+", device.upper())
    return any(name in words for name in _SOLD_AS.get(wanted, (wanted,)))


def mismatch(accelerator: str, device: str | None) -> str | None:
    """Return why a rank must not train on a device, which is ``None`` without a GPU; ``None`` if it may."""
    if device is None:
        return (
            f"GPU type {accelerator!r} was asked for, but torch finds no GPU in this rank: train on "
            "executors that have such GPUs and torch for CUDA, or set DISTRIBUTOR_COMPAT_CPU=2 to try this on CPUs"
        )
    if is_a(accelerator, device):
        return None
    return (
        f"GPU type {accelerator!r} was asked for, but the GPU of this rank is {device!r}: ask for the "
        f"type of this GPU, leave the type out, or train on executors that have GPUs of type {accelerator!r}"
    )


def check_here(accelerator: str, local_rank: int) -> None:
    """ConfigurationError in a rank whose GPU is not of the requested type, before the user's code begins."""
    import torch

    try:
        device = in_fork(lambda: torch.cuda.get_device_name(local_rank))  # leaves CUDA uninitialized in the rank
    except RuntimeError:  # a torch for CPUs, no GPU driver, or no such device
        device = None
    if (error := mismatch(accelerator, device)) is not None:
        raise ConfigurationError(error)


@dataclass(frozen=True)
class OnAccelerator:
    """A launch path whose ranks check the type of their GPU before the user's code begins.

    >>> from distributor.launch import Torchrun
    >>> OnAccelerator("H100", Torchrun()).resolve(2, True).name
    'torchrun'
    """

    accelerator: str
    launch: Launch

    def resolve(self, num_processes: int, use_gpu: bool) -> LaunchPath:
        return cast(LaunchPath, CheckedPath(self.launch.resolve(num_processes, use_gpu), self.accelerator))


@dataclass(frozen=True)
class CheckedPath:
    """Another launch path, with the check of GPUs in its plan."""

    path: LaunchPath
    accelerator: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle asks before ``path`` is there
            raise AttributeError(name)
        return getattr(self.path, name)

    def plan(self, site: Site) -> Plan:
        plan = self.path.plan(site)
        assert plan.first is None
        return replace(plan, first=Call(__name__, "check_here", {"accelerator": self.accelerator}))
