"""The launch path for JAX: in its ranks, ``jax.distributed.initialize()`` needs no arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from distributor.launch.torchrun import Torchrun
from distributor.text import wording
from distributor.values.job import Job
from distributor.values.launch_path import BasePath
from distributor.values.outcome import Failure
from distributor.values.plan import Call, Plan, Site


@dataclass(frozen=True)
class Jax(BasePath):
    """The launch path for JAX. In its ranks, ``jax.distributed.initialize()`` needs no arguments.

    JAX runs on CPUs, or on one GPU per rank, even if a rank has several. JAX's coordinator listens on node 0's address
    only, at a port that is reserved in advance. The warm process, from which later runs are forked, imports JAX, so
    these runs start in less than a second.

    Example:
        >>> from distributor import Distributor
        >>> Distributor(8, launch=Jax()).run(train)  # doctest: +SKIP
    """

    name: ClassVar[str] = "jax"
    preload: ClassVar[tuple[str, ...]] = ("jax",)
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({"jax": "launch=Jax()"})
    ports: ClassVar[int] = 1

    def resolve(self, num_processes: int, use_gpu: bool) -> Jax:
        """Return this object unchanged: this launch path has no configuration to read or to check."""
        return self

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        """Return the environment variables that all ranks get.

        One variable switches off JAX's preemption service. If this service were on, it would catch SIGTERM, and SIGTERM
        would not end ranks (source: ``jax/_src/distributed.py``). If the run uses no GPUs, another variable makes JAX
        use CPUs only.
        """
        return {"JAX_ENABLE_PREEMPTION_SERVICE": "false", **({} if use_gpu else {"JAX_PLATFORMS": "cpu"})}

    def advise(self, failure: Failure, job: Job) -> str:
        """Return advice if JAX was used before ``jax.distributed.initialize()`` was called."""
        if "jax.distributed.initialize() must be called before" in failure.message:
            return "Call jax.distributed.initialize() first, before you import modules that use JAX"
        return ""

    def plan(self, site: Site) -> Plan:
        """Return the plan of one node: what its ranks run, and in which environment."""
        plan, placement, node = Torchrun().plan(site), site.placement, site.node
        coordinator = wording.address(placement.master.address, placement.master.ports[0])
        known = {
            "coordinator": coordinator,
            "address": node.address,
            "world_size": placement.world_size,
            "first_rank": node.first_rank,
            "use_gpu": site.job.resources.use_gpu,
        }
        return replace(plan, first=Call("distributor.launch.jax.cluster", "register", known))
