"""The launch path for MPI: ranks start as with torchrun, and also join one MPI program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from distributor.launch.torchrun import Torchrun
from distributor.values.job import Job
from distributor.values.launch_path import BasePath, key
from distributor.values.outcome import Failure
from distributor.values.plan import Call, Companion, Plan, Site


@dataclass(frozen=True)
class MpiNodes(BasePath):
    """The launch path for MPI. Ranks get torchrun's environment variables, and are also processes of one MPI program.

    Attributes:
        secret: the secret from which the run's keys are made. A process without these keys gets neither the place of a
            rank from a companion nor the command of a daemon from node 0. MPI's own connections do not use these keys.
        implementation: name of the MPI implementation; ``None`` for the implementation that node 0 has.
    """

    name: ClassVar[str] = "mpi"
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({})
    ports: ClassVar[int] = 1

    secret: str = field(repr=False)
    implementation: str | None = None

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        """Return the environment variables that :class:`Torchrun` sets for all ranks."""
        return Torchrun().env(use_gpu)

    def advise(self, failure: Failure, job: Job) -> str:
        """Return advice if mpi4py finds no MPI library."""
        text = f"{failure.message}\n{failure.traceback}"
        if "mpi4py" in text and ("cannot load MPI library" in text or "cannot open shared object" in text):
            return "Install an MPI where ranks run: pip install mpich mpi4py"
        return ""

    def plan(self, site: Site) -> Plan:
        """Return the plan of one node: a companion (a process beside the ranks) runs MPI's process manager."""
        plan, node, head, nodes = Torchrun().plan(site), site.node, site.placement.master, site.placement.nodes
        run = site.job.job_id
        lines = [key(self.secret, run, str(site.attempt), str(each.node_rank))[:16] for each in nodes]
        return replace(
            plan,
            companions=(
                Companion(
                    "mpi",
                    "distributor.launch.mpi.node",
                    "serve",
                    {
                        "node": node.node_rank,
                        "sizes": tuple(each.local_world_size for each in nodes),
                        "hosts": tuple(each.host for each in nodes),
                        "head": (head.address, head.ports[0]),
                        "folder": site.folder,
                        "kind": self.implementation,
                    },
                    {
                        "DISTRIBUTOR_MPI_LINES": " ".join(
                            line for line, each in zip(lines, nodes) for _ in range(each.local_world_size)
                        ),
                        "DISTRIBUTOR_MPI_KEY": key(self.secret, run, "commands"),
                    },
                ),
            ),
            first=Call(
                "distributor.launch.mpi.rank",
                "join",
                {
                    "line": lines[node.node_rank],
                    "world_size": site.placement.world_size,
                    "beside": sum(each.local_world_size for each in nodes if each.host == node.host),
                },
            ),
            last=Call("distributor.launch.mpi.rank", "leave", {"line": lines[node.node_rank]}),
        )
