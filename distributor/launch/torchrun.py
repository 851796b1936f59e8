"""The default launch path: each rank gets the environment variables that ``torchrun`` would set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from distributor.machine import devices
from distributor.values import environment, layout
from distributor.values.environment import NODE_ID, node_id
from distributor.values.launch_path import BasePath
from distributor.values.plan import Plan, Site


@dataclass(frozen=True)
class Torchrun(BasePath):
    """The default launch path. Ranks get torchrun's environment variables, and meet at node 0's rendezvous store."""

    name: ClassVar[str] = "torchrun"
    restarts: ClassVar[bool] = True
    uses_torch: ClassVar[bool] = True

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        # As ``accelerate launch --cpu`` does (``accelerate/utils/launch.py``): without it, Accelerate and Transformers
        # train in each rank alone. DeepSpeed's launch path leaves it out, as they would not use DeepSpeed then.
        return {} if use_gpu else {"ACCELERATE_USE_CPU": "true"}

    def plan(self, site: Site) -> Plan:
        job, placement, node = site.job, site.placement, site.node
        return Plan(
            node=node,
            target=job.target,
            node_env={
                NODE_ID: node_id(job.job_id, node.leader),
                **environment.overlay(site.base_env, node.task_cpus, job.ranks_per_task, job.spark_cpus),
                **environment.waiting({**site.base_env, **job.env}),
                **(
                    {}
                    if job.resources.use_gpu
                    else environment.gloo({**site.base_env, **job.env}, placement.world_size)
                ),
                **site.sockets,
                **devices.rank_visibility(node.gpus, job.resources.use_gpu),
                **job.env,
            },
            rank_env=tuple(_rank_env(site, local_rank) for local_rank in range(node.local_world_size)),
            keep_memory=not job.resources.use_gpu,
        )


def _rank_env(site: Site, local_rank: int) -> dict[str, str]:
    job, placement, node = site.job, site.placement, site.node
    rank = str(node.first_rank + local_rank)
    world_size, numbering = str(placement.world_size), placement.numbering
    return {
        "RANK": rank,
        "LOCAL_RANK": str(numbering.first_local + local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(numbering.local_world_size),
        "NODE_RANK": str(numbering.group_rank),
        "GROUP_RANK": str(numbering.group_rank),
        "GROUP_WORLD_SIZE": str(numbering.groups),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": placement.master.address,
        "MASTER_PORT": str(placement.master.port),
        "TORCHELASTIC_RESTART_COUNT": str(site.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.recovery.max_restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(layout.error(site.folder, local_rank)),
        # torchrun's default: ``torch/distributed/launcher/api.py`` sets it, ``elastic/multiprocessing/api.py`` reads it
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
