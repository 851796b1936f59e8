"""GPU types: their names, and the check in each rank that its GPU is of the requested type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distributor.errors import ConfigurationError
from distributor.rank.gpus import in_fork
from distributor.values.job import Job
from distributor.values.launch import Launch, LaunchPath
from distributor.values.outcome import Failure
from distributor.values.plan import Call, Plan, Site

#: For each GPU type that stands for several models, these models. AWS offers A10G where other clouds offer A10.
_SOLD_AS = {"A10": ("A10", "A10G")}


def is_a(accelerator: str, device: str) -> bool:
    """Return whether a device is of a GPU type.

    Args:
        accelerator: the GPU type to look for, such as ``"H100"``.
        device: torch's name of the device, such as ``"NVIDIA A10G"``.

    Example:
        >>> is_a("h100", "NVIDIA H100 80GB HBM3"), is_a("A10", "NVIDIA A10G"), is_a("A10", "NVIDIA A100-SXM4-40GB")
        (True, True, False)
    """
    wanted = accelerator.upper()
    words = re.split(r"[\s_-]+", device.upper())
    return any(name in words for name in _SOLD_AS.get(wanted, (wanted,)))


def mismatch(accelerator: str, device: str | None) -> str | None:
    """Return the error text that says why a rank must not train on a device; ``None`` if the rank may do so.

    Args:
        accelerator: the GPU type that the user asks for.
        device: torch's name of the rank's GPU; ``None`` if the rank has no GPU.
    """
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
    """Check that the GPU of this rank is of the requested type. Each rank does so before the user's code begins.

    CUDA is asked in a fork of the rank, because it would otherwise be initialized in the rank.

    Args:
        accelerator: the requested GPU type, such as ``"H100"``.
        local_rank: this process's local rank, which is the number of its GPU.

    Raises:
        ConfigurationError: the rank's GPU is of another type, or the rank has no GPU.
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
    """A launch path (a way to start ranks) whose ranks check the type of their GPU before the user's code begins.

    Args:
        accelerator: the GPU type, such as ``"H100"``.
        launch: the launch path that starts the ranks.

    Example:
        >>> from distributor.launch import Torchrun
        >>> OnAccelerator("H100", Torchrun()).resolve(2, True).name
        'torchrun'
    """

    accelerator: str
    launch: Launch

    def resolve(self, num_processes: int, use_gpu: bool) -> CheckedPath:
        """Resolve ``launch``, and add the check of GPUs to its launch path. Raises the errors of ``launch.resolve``."""
        return CheckedPath(self.launch.resolve(num_processes, use_gpu), self.accelerator)


@dataclass(frozen=True)
class CheckedPath:
    """A launch path (a way to start ranks) that wraps another one. Each rank checks its GPU before the user's code."""

    path: LaunchPath
    accelerator: str

    @property
    def name(self) -> str:
        """The name of the wrapped launch path."""
        return self.path.name

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules to import before ranks are forked, as the wrapped launch path says."""
        return self.path.preload

    @property
    def needs(self) -> Mapping[str, str]:
        """The modules that ranks must import, each with the option that needs it, as the wrapped launch path says."""
        return self.path.needs

    @property
    def ports(self) -> int:
        """The number of ports to reserve for each process, as the wrapped launch path says."""
        return self.path.ports

    @property
    def restarts(self) -> bool:
        """Whether the processes of the wrapped launch path can be started again on the same nodes."""
        return self.path.restarts

    @property
    def uses_torch(self) -> bool:
        """Whether ranks compute with torch, as the wrapped launch path says."""
        return self.path.uses_torch

    @property
    def spark_prefix(self) -> str:
        """The prefix of PySpark's setting, as the wrapped launch path says."""
        return self.path.spark_prefix

    @property
    def deepspeed_config(self) -> str | None:
        """The final DeepSpeed configuration of the wrapped launch path, if it has one."""
        return self.path.deepspeed_config

    @property
    def once(self) -> bool:
        """Whether the wrapped launch path runs the user's code once, on node 0, instead of in each process."""
        return self.path.once

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        """Return the environment variables of the wrapped launch path."""
        return self.path.env(use_gpu)

    def advise(self, failure: Failure, job: Job) -> str:
        """Return the advice of the wrapped launch path on a failure."""
        return self.path.advise(failure, job)

    def plan(self, site: Site) -> Plan:
        """Return the wrapped launch path's plan of one node (what the node does), with the check of GPUs added.

        A plan can name only one function that ranks call before the user's code. Here, this function is the check of
        GPUs, so the plan of the wrapped launch path must not name such a function.
        """
        plan = self.path.plan(site)
        assert plan.first is None
        return replace(plan, first=Call(__name__, "check_here", {"accelerator": self.accelerator}))
