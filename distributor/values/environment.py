"""The environment of ranks: what the run decides, and what is the same for all ranks of a node.

Standard library only: Spark's Python workers use it as well, to start the process that imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

#: The environment variable that marks the processes of one node of one run: launcher, ranks and their children.
NODE_ID = "DISTRIBUTOR_NODE_ID"


def node_id(run_id: str, leader: int) -> str:
    """The mark of a node's processes; ``leader`` is the partition of the task that runs its agent."""
    return f"{run_id}.{leader}"


#: What the run decides and ``env=`` cannot: a rank that lied about these would hang or corrupt the others.
#: Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
CONTRACT = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    NODE_ID,
)

#: Who listens for other ranks on which network interface, and how a name is written so that it means only that one.
#: Sources: https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use,
#: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname (without "=", a prefix)
_INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}", "TP_SOCKET_IFNAME": "{}"}


#: Ranks up to which all connect with all: that takes 0.16 s with 32 ranks on two CPUs, and 0.53 s with 64.
_MESH = 32


def sockets(environ: Mapping[str, str], interface: str | None, leave_nccl: bool = False) -> dict[str, str]:
    """Has collectives use a network interface, where the environment says nothing of that yet.

    Left alone, gloo listens on whatever address the host's name resolves to, which may be loopback.

    Args:
        environ: what is set already.
        interface: which one; ``None`` sets nothing.
        leave_nccl: NCCL knows better.

    >>> sockets({"NCCL_SOCKET_IFNAME": "ib0"}, "eth1")
    {'GLOO_SOCKET_IFNAME': 'eth1', 'TP_SOCKET_IFNAME': 'eth1'}
    """
    if interface is None:
        return {}
    known = {*environ, "NCCL_SOCKET_IFNAME"} if leave_nccl else environ
    return {name: form.format(interface) for name, form in _INTERFACES.items() if name not in known}


def gloo(environ: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Return what has gloo connect two ranks when they first talk, in place of all with all, for many ranks on CPUs.

    ``init_process_group`` still returns once all ranks have called it, as it does with all connections. Few ranks
    connect all with all, as torch has it: then a collective that a rank does not reach fails at once, and otherwise
    at the group's timeout or, with three ranks and less, never (https://github.com/pytorch/gloo/issues/520). Torch
    before 2.8 does not know the first variable.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#improving-initialization-time

    Args:
        environ: what is set already, which stays; a word on the first variable leaves the second alone.
        world_size: number of ranks.

    >>> gloo({"TORCH_GLOO_LAZY_INIT": "0"}, 64), gloo({}, 32)
    ({}, {})
    """
    if "TORCH_GLOO_LAZY_INIT" in environ or world_size <= _MESH:
        return {}
    return {
        "TORCH_GLOO_LAZY_INIT": "1",
        "TORCH_DIST_INIT_BARRIER": environ.get("TORCH_DIST_INIT_BARRIER", "1"),
    }


def nccl_knows_better(environ: Mapping[str, str]) -> bool:
    """Whether NCCL has been told its interfaces in a file of its own, or there is IP over InfiniBand, which it prefers.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (NCCL_CONF_FILE, NCCL_SOCKET_IFNAME).
    """
    for path in (environ.get("NCCL_CONF_FILE", ""), os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf"):
        with suppress(OSError, UnicodeDecodeError), open(path) as settings:
            if any(line.strip().startswith("NCCL_SOCKET_IFNAME") for line in settings):
                return True
    with suppress(OSError):
        return any(name.startswith("ib") for name in os.listdir("/sys/class/net"))
    return False


def overlay(
    environ: Mapping[str, str], task_cpus: int, ranks_per_task: int, spark_cpus: int | None = None
) -> dict[str, str | None]:
    """What is set on top of a task's own environment, or removed from it (``None``); the user's ``env`` wins over it.

    Args:
        environ: the environment that the task has.
        task_cpus: CPUs of one task.
        ranks_per_task: ranks that share them.
        spark_cpus: CPUs of Spark's tasks by default, if that may be another number.
    """
    return {
        "OMP_NUM_THREADS": _omp_threads(environ, task_cpus, ranks_per_task, spark_cpus or task_cpus),
        # Spark sets it for its own workers; in a rank it would make each printed piece a system call.
        "PYTHONUNBUFFERED": None,
        # What torchrun sets for its ranks: a collective that NCCL gave up on ends the rank.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def apply(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with changes made to it; ``None`` removes a variable.

    >>> apply({"A": "1", "B": "2"}, {"A": None, "C": "3"})
    {'B': '2', 'C': '3'}
    """
    merged = {**environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _omp_threads(environ: Mapping[str, str], task_cpus: int, ranks_per_task: int, spark_cpus: int) -> str:
    """The rank's share of CPUs, unless the user set another number.

    Spark sets ``spark.task.cpus`` for its workers by itself, even where a task has more: that is not the user's word.
    """
    already = environ.get("OMP_NUM_THREADS")
    if already is None or already in (str(task_cpus), str(spark_cpus)):
        return str(max(1, task_cpus // ranks_per_task))
    return already
