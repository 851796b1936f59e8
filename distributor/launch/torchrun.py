"""The plain DistributedDataParallel path: each rank gets what ``torchrun`` would give it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from distributor.machine import devices
from distributor.values import environment
from distributor.values.environment import NODE_ID, node_id
from distributor.values.job import Job
from distributor.values.placement import Node, Placement
from distributor.values.plan import Plan

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Torchrun:
    """Plans ranks that rendezvous through the store of torch's elastic agent on node 0."""

    def plan(
        self,
        job: Job,
        placement: Placement,
        node: Node,
        base_env: Mapping[str, str],
        sockets: Mapping[str, str] = _NOTHING,
        folder: str = "",
    ) -> Plan:
        """What a node does.

        Args:
            job: what is asked.
            placement: who runs where.
            node: the node to plan for.
            base_env: the environment that its task has; decides only what the user has already set there.
            sockets: variables that say over which network interface ranks talk.
            folder: the node's private folder, where its ranks find files.
        """
        return Plan(
            node=node,
            target=job.target,
            node_env={
                NODE_ID: node_id(job.run_id, node.leader),
                **environment.overlay(base_env, node.task_cpus, job.ranks_per_task, job.spark_cpus),
                **({} if job.use_gpu else environment.gloo({**base_env, **job.env}, placement.world_size)),
                **sockets,
                **devices.rank_visibility(node.gpus, job.use_gpu),
                **job.env,
            },
            rank_env=tuple(_rank_env(job, placement, node, local_rank) for local_rank in range(node.local_world_size)),
            keep_memory=not job.use_gpu,
        )


def _rank_env(job: Job, placement: Placement, node: Node, local_rank: int) -> dict[str, str]:
    rank = str(node.first_rank + local_rank)
    world_size = str(placement.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(node.local_world_size),
        "NODE_RANK": str(node.node_rank),
        "GROUP_RANK": str(node.node_rank),
        "GROUP_WORLD_SIZE": str(len(placement.nodes)),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": placement.master.address,
        "MASTER_PORT": str(placement.master.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
