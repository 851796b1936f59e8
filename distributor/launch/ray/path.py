"""The launch path for Ray: all nodes form one Ray cluster, and the user's code runs once, as Ray's driver."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from distributor.errors import ConfigurationError
from distributor.launch.torchrun import Torchrun
from distributor.text import wording
from distributor.values.checks import check_memory
from distributor.values.launch_path import BasePath, key
from distributor.values.placement import Node
from distributor.values.plan import Companion, Plan, Site

_LEAST = 78_643_200  # bytes of an object store; ``ray/_private/ray_constants.py``

#: Of the path of Ray's folder. A socket's path has at most 107 bytes (unix(7)), and Ray appends names
#: such as ``session_2026-11-23_20-25-42_123456_1234567/sockets/plasma_store``.
_LONGEST = 42


@dataclass(frozen=True)
class Ray(BasePath):
    """The launch path that starts a Ray cluster on the run's nodes, and runs the function once, as Ray's driver.

    ``num_processes`` is the number of Ray workers that fit into the cluster. Each node offers Ray the CPUs and GPUs
    that the workers on this node need. The user's function runs on node 0. There, ``ray.init()`` joins the cluster. If
    the function does not call ``ray.init()``, Ray itself does so when Ray is first used. ``run()`` returns what the
    function returns. The cluster ends when the function ends. The cluster accepts only the processes of the run, which
    have the cluster's token.

    Args:
        object_store_memory: size of each node's object store, such as ``"2g"``, at least 78,643,200 bytes. ``None``
            (default): Ray's own default, at most 30 % of the memory that is available when Ray starts.

    Example:
        >>> from distributor import Distributor
        >>> def train():
        ...     from ray.train import ScalingConfig
        ...     from ray.train.torch import TorchTrainer
        ...     return TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=8)).fit().metrics
        >>> Distributor(8, launch=Ray(object_store_memory="2g")).run(train)  # doctest: +SKIP
    """

    name: ClassVar[str] = "ray"
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({"ray": "launch=Ray()"})
    ports: ClassVar[int] = 2
    once: ClassVar[bool] = True

    object_store_memory: int | str | None = None
    secret: str = field(default="", kw_only=True, repr=False)  # of this run; the cluster's token is made from it

    def resolve(self, num_processes: int, use_gpu: bool) -> Ray:
        size = self.object_store_memory
        if size is not None:
            size = check_memory("object_store_memory", size)
            if size < _LEAST:
                raise ConfigurationError(
                    f"object_store_memory must be at least {_LEAST:,} bytes (Ray's minimum), not "
                    f"{self.object_store_memory!r}"
                )
        return Ray(size, secret=secrets.token_hex(16))

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        return Torchrun().env(use_gpu)

    def plan(self, site: Site) -> Plan:
        plan, node, head = Torchrun().plan(site), site.node, site.placement.master
        token = key(self.secret, site.job.job_id)
        port, client_port = head.ports[:2]
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        known = {**access, "RAY_ADDRESS": wording.address(head.address, port)}
        temporary = self._temporary(site)
        return replace(
            plan,
            rank_env=tuple({**env, **known} for env in plan.rank_env),
            elsewhere=() if temporary.startswith(f"{site.folder}{os.sep}") else (temporary,),
            companions=(
                Companion(
                    "ray",
                    "distributor.launch.ray.node",
                    "serve",
                    {
                        "head": None if node == head else (head.address, port),
                        "arguments": (*self._resources(site), *_places(node, head, port, client_port, temporary)),
                        "temporary": temporary,
                        "use_gpu": site.job.resources.use_gpu,
                    },
                    {**access, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", "RAY_USAGE_STATS_ENABLED": "0"},
                ),
            ),
        )

    def _resources(self, site: Site) -> tuple[str, ...]:
        node, store = site.node, self.object_store_memory
        tasks = node.slots // site.job.ranks_per_task
        sizes = () if store is None else (f"--object-store-memory={store}",)
        return (f"--num-cpus={tasks * node.task_cpus}", f"--num-gpus={len(node.gpus)}", *sizes)

    def _temporary(self, site: Site) -> str:
        """Return the folder for Ray's files: in the node's folder, or in ``/tmp`` if socket paths would be too long."""
        inside = os.path.join(site.folder, "ray")
        if len(inside) <= _LONGEST:
            return inside
        unknown = key(self.secret, site.folder)[:8]  # so that no other user can create the folder first
        return f"/tmp/dr-{site.job.job_id}-{unknown}"  # noqa: S108


def _places(node: Node, head: Node, port: int, client_port: int, temporary: str) -> tuple[str, ...]:
    """Return a node's addresses, ports and folder as arguments of ``ray start``; the system chooses other ports."""
    role: tuple[str, ...] = (f"--address={wording.address(head.address, port)}",)
    if node == head:
        role = (
            "--head",
            f"--port={port}",
            f"--ray-client-server-port={client_port}",
            "--include-dashboard=false",
            "--disable-usage-stats",
        )
    return (
        *role,
        f"--node-ip-address={node.address}",
        f"--temp-dir={temporary}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
    )
