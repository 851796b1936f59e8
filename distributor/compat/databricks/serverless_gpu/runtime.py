"""``serverless_gpu.runtime``: functions that return the rank of a process, the number of its node, and related numbers.

Outside of a run, the functions of this module return the numbers of a single rank, such as rank 0 and world size 1.

Source: https://api-docs.databricks.com/python/serverless_gpu/api/generated/serverless_gpu.runtime.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import distributor.runtime as runtime

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def get_global_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank, within ``group`` if one is given; -1 outside of the group, as from torch.

    >>> get_global_rank()  # doctest: +SKIP
    0
    """
    if group is None:
        return runtime.rank()
    import torch.distributed as dist

    return int(dist.get_rank(group))


def get_world_size() -> int:
    """Return the number of ranks that train together."""
    return runtime.world_size()


def get_local_rank() -> int:
    """Return this process's rank within its node. The GPU of this process is ``cuda:LOCAL_RANK``."""
    return runtime.local_rank()


def get_local_world_size() -> int:
    """Return the number of ranks on this node."""
    return runtime.local_world_size()


def get_node_rank() -> int:
    """Return the number of this node, counted from 0. A node is an executor, or this machine."""
    return runtime.node_rank()


def get_replica_rank() -> int:
    """Return the number of this node, as if each node had one replica of the model, sharded over the node's GPUs.

    That each node has one replica is an assumption: Databricks' public documentation does not define the replica rank.
    """
    return runtime.node_rank()
