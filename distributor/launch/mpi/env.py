"""The launch path ``"mpi-env"``: ranks start as with torchrun, and also get Open MPI's variables. No MPI is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from distributor.launch.torchrun import Torchrun
from distributor.text import wording
from distributor.values.job import Job
from distributor.values.launch_path import BasePath
from distributor.values.outcome import Failure
from distributor.values.placement import Share
from distributor.values.plan import Plan, Site


@dataclass(frozen=True)
class MpiEnv(BasePath):
    """The launch path for code that reads its rank from Open MPI's or Azure's environment variables. No MPI is started.

    Ranks get ``OMPI_COMM_WORLD_RANK`` and related variables in addition to torchrun's, and the address of rank 0 as
    ``AZ_BATCH_MASTER_NODE`` and ``AZ_BATCHAI_MPI_MASTER_NODE``.

    Example:
        >>> from distributor import Distributor
        >>> Distributor(8, launch=MpiEnv()).run("train.py")  # doctest: +SKIP
    """

    name: ClassVar[str] = "mpi-env"

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        return Torchrun().env(use_gpu)

    def advise(self, failure: Failure, job: Job) -> str:
        if "MPI_Init" in f"{failure.message}\n{failure.log_tail}":
            return 'launch="mpi-env" sets variables and starts no MPI: code that calls MPI needs launch="mpi"'
        return ""

    def plan(self, site: Site) -> Plan:
        plan = Torchrun().plan(site)
        return replace(
            plan,
            rank_env=tuple(
                {**env, **_variables(site.placement, local_rank)} for local_rank, env in enumerate(plan.rank_env)
            ),
        )


def _variables(placement: Share, local_rank: int) -> dict[str, str]:
    # https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html,
    # https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu
    node, master, numbering = placement.node, placement.master, placement.numbering
    local = str(numbering.first_local + local_rank)
    return {
        "OMPI_COMM_WORLD_RANK": str(node.first_rank + local_rank),
        "OMPI_COMM_WORLD_SIZE": str(placement.world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": local,
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(numbering.local_world_size),
        "OMPI_COMM_WORLD_NODE_RANK": local,
        "AZ_BATCH_MASTER_NODE": wording.address(master.address, master.port),
        "AZ_BATCHAI_MPI_MASTER_NODE": master.address,
    }
