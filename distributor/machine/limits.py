"""Resource limits that are often too low for torch by default."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass

from distributor.text.wording import mebibytes

#: Bytes of /dev/shm for each rank, and at least for a node. With a container's 64 MiB, data loaders and NCCL fail.
_SHM_PER_RANK = 64 << 20
_SHM_LEAST = 256 << 20

_DRIVER_FILES = 256  # of a driver, besides connections to nodes


@dataclass(frozen=True)
class Limits:
    """The limits of a process on one machine; ``None`` if unlimited."""

    shared_memory: int | None  # bytes of /dev/shm; None without one
    locked_memory: int | None  # bytes (``ulimit -l``)
    address_space: int | None  # bytes (``ulimit -v``)
    infiniband: bool  # or RoCE
    files: int | None = None  # once the process has raised its own limit (``ulimit -Hn``)


def here() -> Limits:
    """Return this process's limits on memory and open files, the size of /dev/shm, and whether there is InfiniBand."""
    try:
        shm = os.statvfs("/dev/shm")  # noqa: S108
        shared_memory = shm.f_frsize * shm.f_blocks
    except OSError:
        shared_memory = None
    try:
        infiniband = bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        infiniband = False

    memory, address_space = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_AS))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    finite = [None if limit == resource.RLIM_INFINITY else limit for limit in (memory, address_space, files)]
    return Limits(shared_memory, finite[0], finite[1], infiniband, finite[2])


def open_files() -> int:
    """Return the number of files that this process may have open (its soft limit)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_open_files(needed: int) -> None:
    """Let this process open ``needed`` files, or as many as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def driver_sockets(tasks: int) -> str | None:
    """Let a driver have two connections to each task, as while agents start. Return a warning if it may have fewer."""
    raise_open_files(needed := 2 * tasks + _DRIVER_FILES)
    if (most := open_files()) >= needed:
        return None
    return (
        f"the driver may open only {most:,} files (ulimit -Hn), but a run of {tasks:,} tasks needs about {needed:,}, "
        "since each task and node has a connection: nodes without one have no live log lines. Raise the hard limit of "
        "the driver's process (limits.conf, LimitNOFILE, docker run --ulimit nofile=65536)"
    )


def set_open_files(pid: int, most: int) -> None:
    """Set another process's soft limit on open files, as from :func:`open_files`. It may raise the limit again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = resource.RLIM_INFINITY if most == sys.maxsize else most
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def total_memory() -> int:
    """Return the bytes of memory of this machine, or of this container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # At the top of /sys/fs/cgroup, a process outside containers finds no limit.
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):  # no such file, or "max" (no limit)
            continue
    return total


def free_memory() -> int:
    """Return the bytes of memory that processes of this machine or container can still get."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.current") as file:
        used = int(file.read())
        with open("/sys/fs/cgroup/memory.stat") as stat:
            cached = sum(int(line.split()[1]) for line in stat if line.startswith(("active_file ", "inactive_file ")))
        free = min(free, max(0, total_memory() - used + cached))
    return free


def shortages(limits: Limits, ranks: int, use_gpu: bool, files: int = 0) -> list[str]:
    """Return a text for each limit that is too low, with the remedy. It completes "the node on HOST ..."."""
    texts = []
    if limits.files is not None and limits.files < files:
        texts.append(
            f"lets a process open only {limits.files:,} files (ulimit -Hn), but the launcher of {ranks:,} ranks needs "
            f"about {files:,} ('Too many open files'): raise the hard limit of the process that starts executors, or "
            "of the driver in local mode (limits.conf, LimitNOFILE, docker run --ulimit nofile=65536)"
        )
    needed = max(_SHM_LEAST, ranks * _SHM_PER_RANK)
    if limits.shared_memory is not None and limits.shared_memory < needed:
        texts.append(
            f"has {mebibytes(limits.shared_memory)} of /dev/shm, too little for NCCL and for data loaders with workers."
            f" Both may crash ('bus error', 'unable to mmap'). Provide {mebibytes(needed)} or more: docker run "
            "--shm-size, or on Kubernetes an emptyDir of medium Memory mounted at /dev/shm"
        )
    if use_gpu and limits.infiniband and limits.locked_memory is not None:
        texts.append(
            f"has InfiniBand, but lets processes lock only {mebibytes(limits.locked_memory)} of memory (ulimit -l): "
            "NCCL cannot register its buffers ('ibv_reg_mr failed'). Set memlock to unlimited for the process that "
            "starts executors (limits.conf, LimitMEMLOCK, docker run --ulimit memlock=-1), or set NCCL_IB_DISABLE=1 "
            "in env="
        )
    if (text := little_address_space(limits)) is not None:
        texts.append(text)
    return texts


def little_address_space(limits: Limits) -> str | None:
    """Return a text, as for :func:`shortages`, if the address space of processes is limited; otherwise ``None``."""
    if limits.address_space is None:
        return None
    return (
        f"limits the address space of each process to {mebibytes(limits.address_space)} (ulimit -v; Spark sets it from "
        "spark.executor.pyspark.memory): torch maps more memory than it uses, and CUDA far more. Unset this limit, and "
        "set spark.executor.memoryOverhead instead"
    )
