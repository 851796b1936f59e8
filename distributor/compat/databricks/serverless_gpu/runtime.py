"""``serverless_gpu.runtime``: the rank of a process and related numbers; outside of a run, those of a single rank.

A node is an executor, or this machine. Databricks does not define the replica rank; here it is the node's number.
Source: https://api-docs.databricks.com/python/serverless_gpu/api/generated/serverless_gpu.runtime.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributor.runtime import (
    local_rank as get_local_rank,
    local_world_size as get_local_world_size,
    node_rank as get_node_rank,
    rank,
    world_size as get_world_size,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_replica_rank",
    "get_world_size",
]

get_replica_rank = get_node_rank


def get_global_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank, within ``group`` if one is given; -1 outside of the group, as from torch.

    >>> get_global_rank()  # doctest: +SKIP
    0
    """
    if group is None:
        return rank()
    import torch.distributed as dist

    return int(dist.get_rank(group))
