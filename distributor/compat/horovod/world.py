"""Horovod's functions about ranks, over ``torch.distributed``."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
import torch.distributed as dist

from distributor import runtime
from distributor.errors import ConfigurationError


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the process group of all ranks, unless this process has already joined a group.

    Outside of a run, the group has this process only.

    Args:
        comm, process_sets: refused, since all ranks train together.

    Raises:
        ConfigurationError: ``comm`` or ``process_sets`` is given.
    """
    for name, value in (("comm", comm), ("process_sets", process_sets)):
        if value:
            raise ConfigurationError(
                f"init({name}={value!r}) is not supported, since all ranks of a run train together: leave it out. For "
                "a group of some ranks, use torch.distributed.new_group"
            )
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = cast(Any, dist).HashStore()  # a store in the memory of this process
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def shutdown() -> None:
    """Leave torch's process group, if this process has joined it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    """Return whether this process has joined a process group, through :func:`init` or otherwise."""
    return dist.is_initialized()


def require(name: str) -> None:
    """Check that :func:`init` was called.

    Raises:
        ConfigurationError: :func:`init` was not called. The error text says that the function ``name`` needs
            :func:`init`.
    """
    if not dist.is_initialized():
        raise ConfigurationError(f"hvd.{name} needs the other ranks: call hvd.init() first")


def rank() -> int:
    """Return this process's rank, counted from 0."""
    require("rank")
    return dist.get_rank()


def size() -> int:
    """Return the number of ranks."""
    require("size")
    return dist.get_world_size()


def local_rank() -> int:
    """Return this process's rank within its node. The GPU of this process is ``cuda:LOCAL_RANK``."""
    require("local_rank")
    return runtime.local_rank()


def local_size() -> int:
    """Return the number of ranks on this node."""
    require("local_size")
    return runtime.local_world_size()


def cross_rank() -> int:
    """Return the number of this node, counted from 0."""
    require("cross_rank")
    return runtime.node_rank()


def cross_size() -> int:
    """Return the number of nodes."""
    require("cross_size")
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def mpi_built() -> bool:
    """Return ``False``: MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """Return ``False``: ranks do not communicate through MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Return ``False``: MPI is not used. For mpi4py, start the ranks with ``Distributor(n, launch="mpi")``."""
    return False


def nccl_built() -> bool:
    """Return whether torch has NCCL."""
    return bool(dist.is_nccl_available())


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return bool(dist.is_gloo_available())


def gloo_enabled() -> bool:
    """Return whether ranks may communicate through gloo."""
    return gloo_built()


def ccl_built() -> bool:
    """Return ``False``: oneCCL is not used."""
    return False


def ddl_built() -> bool:
    """Return ``False``: IBM's DDL is not used."""
    return False


def rocm_built() -> bool:
    """Return whether torch is built for ROCm."""
    return torch.version.hip is not None


def cuda_built() -> bool:
    """Return whether torch is built for CUDA."""
    return torch.version.cuda is not None
