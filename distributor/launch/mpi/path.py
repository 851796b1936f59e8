"""The launch path for MPI: ranks start as with torchrun, and also join one MPI program."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distributor.launch.torchrun import Torchrun
from distributor.values.checks import one_of, optional
from distributor.values.job import Job
from distributor.values.launch_path import BasePath, key
from distributor.values.outcome import Failure
from distributor.values.plan import Call, Companion, Plan, Site


@dataclass(frozen=True)
class Mpi(BasePath):
    """The launch path for code that calls MPI, for example with mpi4py.

    ``COMM_WORLD`` contains the run's ranks, in rank order. MPICH or Open MPI 5 must be installed on each node
    (``pip install mpich mpi4py``). MPI's own process manager connects the ranks, without ssh. Ranks are started as on
    the other launch paths, and have torchrun's environment variables too, so the same code may use
    ``torch.distributed``.

    Args:
        implementation: ``"mpich"`` or ``"openmpi"``. ``None`` (default): the implementation that node 0 has; MPICH if
            node 0 has both.

    Example:
        >>> from distributor import Distributor
        >>> def train():
        ...     from mpi4py import MPI
        ...     return MPI.COMM_WORLD.allreduce(1)
        >>> Distributor(8, launch=Mpi()).run(train)  # doctest: +SKIP
        8
    """

    name: ClassVar[str] = "mpi"
    ports: ClassVar[int] = 1
    all_nodes: ClassVar[bool] = True

    implementation: str | None = None
    # A process without the keys made from it gets neither the place of a rank nor the command of a daemon. MPI's own
    # connections do not use these keys.
    secret: str = field(default="", kw_only=True, repr=False)

    def resolve(self, num_processes: int, use_gpu: bool) -> Mpi:
        optional(one_of("mpich", "openmpi"))("implementation", self.implementation)
        return replace(self, secret=secrets.token_hex(16))

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        return Torchrun().env(use_gpu)

    def advise(self, failure: Failure, job: Job) -> str:
        text = f"{failure.message}\n{failure.traceback}"
        if "mpi4py" in text and ("cannot load MPI library" in text or "cannot open shared object" in text):
            return "Install an MPI where ranks run: pip install mpich mpi4py"
        return ""

    def plan(self, site: Site) -> Plan:
        plan, node, head, nodes = Torchrun().plan(site), site.node, site.placement.master, site.placement.nodes
        run = site.job.job_id
        lines = [key(self.secret, run, str(site.attempt), str(member.node_rank))[:16] for member in nodes]
        return replace(
            plan,
            companions=(
                Companion(
                    "mpi",
                    "distributor.launch.mpi.node",
                    "serve",
                    {
                        "node": node.node_rank,
                        "sizes": tuple(member.local_world_size for member in nodes),
                        "hosts": tuple(member.host for member in nodes),
                        "head": (head.address, head.ports[0]),
                        "folder": site.folder,
                        "kind": self.implementation,
                    },
                    {
                        "DISTRIBUTOR_MPI_LINES": " ".join(
                            line for line, member in zip(lines, nodes) for _ in range(member.local_world_size)
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
                    "beside": sum(member.local_world_size for member in nodes if member.host == node.host),
                    "folder": site.folder,
                },
            ),
            last=Call("distributor.launch.mpi.rank", "leave", {"line": lines[node.node_rank]}),
        )
