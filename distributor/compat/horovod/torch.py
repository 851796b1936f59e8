"""``horovod.torch`` (programs import it as ``hvd``), built on ``torch.distributed``. Runs in ranks.

    from distributor.compat.horovod import torch as hvd      # instead of: import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Names that are not supported raise an error that says what to use instead.
Source: https://horovod.readthedocs.io/en/stable/api.html.
"""

from __future__ import annotations

from typing import Any

from distributor.compat.horovod.collectives import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
    allgather as allgather,
    allgather_async as allgather_async,
    allgather_object as allgather_object,
    allreduce as allreduce,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    barrier as barrier,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    broadcast_object as broadcast_object,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    poll as poll,
    synchronize as synchronize,
)
from distributor.compat.horovod.compression import Compression as Compression
from distributor.compat.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from distributor.compat.horovod.state import (
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
)
from distributor.compat.horovod.world import (
    ccl_built as ccl_built,
    cross_rank as cross_rank,
    cross_size as cross_size,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    init as init,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_size as local_size,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rank as rank,
    rocm_built as rocm_built,
    shutdown as shutdown,
    size as size,
)
from distributor.errors import ConfigurationError

_GROUPS = "torch.distributed.new_group"

#: What to use instead of each name of ``horovod.torch`` that is not supported.
INSTEAD = {
    "HorovodInternalError": "RuntimeError, which torch.distributed raises",
    "ProcessSet": _GROUPS,
    "add_process_set": _GROUPS,
    "alltoall": "torch.distributed.all_to_all_single",
    "alltoall_async": "torch.distributed.all_to_all_single with async_op=True",
    "elastic": "checkpoints and max_restarts=, with which a run continues after a failure (see docs/resume.md)",
    "global_process_set": _GROUPS,
    "grouped_allgather": "hvd.allgather for each tensor",
    "grouped_allgather_async": "hvd.allgather_async for each tensor",
    "grouped_allreduce_async": "hvd.allreduce_async for each tensor",
    "grouped_allreduce_async_": "hvd.allreduce_async_ for each tensor",
    "grouped_reducescatter": "torch.distributed.reduce_scatter_tensor for each tensor",
    "grouped_reducescatter_async": "torch.distributed.reduce_scatter_tensor with async_op=True for each tensor",
    "join": "a DistributedSampler, which gives all ranks the same number of batches",
    "reducescatter": "torch.distributed.reduce_scatter_tensor",
    "reducescatter_async": "torch.distributed.reduce_scatter_tensor with async_op=True",
    "remove_process_set": _GROUPS,
    "sparse_allreduce_async": "hvd.allreduce_async of tensor.to_dense()",
    "start_timeline": "torch.profiler",
    "stop_timeline": "torch.profiler",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
}


def __getattr__(name: str) -> Any:
    if name not in INSTEAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ConfigurationError(f"hvd.{name} is not supported: use {INSTEAD[name]}")
