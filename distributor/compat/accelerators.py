"""GPU types: their names, and the check in each rank that its GPU is of the requested type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distributor.errors import ConfigurationError
from distributor.rank.gpus import in_fork
from distributor.values.job import Job
from distributor.values.launch_path import Launch, LaunchPath
from distributor.values.outcome import Failure
from distributor.values.plan import Call, Plan, Site

_SOLD_AS = {"A10": ("A10", "A10G")}  # AWS offers A10G where other clouds offer A10


def is_a(accelerator: str, device: str) -> bool:
    """Return whether a device, by torch's name, is of a GPU type.

    >>> is_a("h100", "NVIDIA H100 80GB HBM3"), is_a("A10", "NVIDIA A10G"), is_a("A10", "NVIDIA A100-SXM4-40GB")
    (True, True, False)
    """
    wanted = accelerator.upper()
    words = re.split(r"[\s_-]+", device.upper())
    return any(name in words for name in _SOLD_AS.get(wanted, (wanted,)))


def mismatch(accelerator: str, device: str | None) -> str | None:
    """Return the error text that says why a rank must not train on a device, or without one."""
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
    """Raise ConfigurationError unless this rank's GPU is of the requested type.

    CUDA is asked in a fork of the rank, because it would otherwise be initialized in the rank.
    """
    import torch

    try:
        device = in_fork(lambda: torch.cuda.get_device_name(local_rank))
    except RuntimeError:  # a torch for CPUs, no GPU driver, or no such device
        device = None
    if (told := mismatch(accelerator, device)) is not None:
        raise ConfigurationError(told)


@dataclass(frozen=True)
class OnAccelerator:
    """A launch path whose ranks check the type of their GPU before the user's code begins.

    >>> from distributor.launch import Torchrun
    >>> OnAccelerator("H100", Torchrun()).resolve(2, True).name
    'torchrun'
    """

    accelerator: str
    launch: Launch

    def resolve(self, num_processes: int, use_gpu: bool) -> CheckedPath:
        return CheckedPath(self.launch.resolve(num_processes, use_gpu), self.accelerator)


@dataclass(frozen=True)
class CheckedPath:
    """Wraps another launch path. Each rank checks its GPU before the user's code."""

    path: LaunchPath
    accelerator: str

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def preload(self) -> tuple[str, ...]:
        return self.path.preload

    @property
    def needs(self) -> Mapping[str, str]:
        return self.path.needs

    @property
    def ports(self) -> int:
        return self.path.ports

    @property
    def restarts(self) -> bool:
        return self.path.restarts

    @property
    def uses_torch(self) -> bool:
        return self.path.uses_torch

    @property
    def once(self) -> bool:
        return self.path.once

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        return self.path.env(use_gpu)

    def advise(self, failure: Failure, job: Job) -> str:
        return self.path.advise(failure, job)

    def plan(self, site: Site) -> Plan:
        plan = self.path.plan(site)
        assert plan.first is None  # a plan names only one function to call before the user's code
        return replace(plan, first=Call(__name__, "check_here", {"accelerator": self.accelerator}))
