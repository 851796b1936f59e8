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

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        # The preemption service would catch SIGTERM, which would then not end ranks (``jax/_src/distributed.py``).
        return {"JAX_ENABLE_PREEMPTION_SERVICE": "false", **({} if use_gpu else {"JAX_PLATFORMS": "cpu"})}

    def advise(self, failure: Failure, job: Job) -> str:
        if "jax.distributed.initialize() must be called before" in failure.message:
            return "Call jax.distributed.initialize() first, before you import modules that use JAX"
        return ""

    def plan(self, site: Site) -> Plan:
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
