"""The environment variables that a run sets in its ranks.

Standard library only: Spark's Python workers import this too, to start the process that imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

#: Marks the processes of one node of a run: its launcher, companions, ranks and their children, but not its agent.
NODE_ID = "DISTRIBUTOR_NODE_ID"

#: If "0", ranks do not check that they see the GPUs that they were promised.
CHECK_GPUS = "DISTRIBUTOR_CHECK_GPUS"


def job_id(run_id: str, attempt: int) -> str:
    """Return the ID of a run's job with this first attempt; the first job has the run's ID.

    >>> job_id("3f2a", 0), job_id("3f2a", 2)
    ('3f2a', '3f2a-2')
    """
    return f"{run_id}-{attempt}" if attempt else run_id


def node_id(job_id: str, leader: int) -> str:
    """Return the value of :data:`NODE_ID`; ``leader`` is the partition of the task that runs the node's agent."""
    return f"{job_id}.{leader}"


def is_of_earlier_job(mark: str, run_id: str, attempt: int) -> bool:
    """Return whether a node's ID is of an earlier job of the run: one that began before ``attempt``.

    >>> is_of_earlier_job("3f2a.0", "3f2a", 2), is_of_earlier_job("3f2a-2.0", "3f2a", 2)
    (True, False)
    """
    match = re.fullmatch(rf"{re.escape(run_id)}(?:-(\d+))?\.\d+", mark)
    return match is not None and int(match[1] or 0) < attempt


#: Only the run sets these, and not ``env=``: wrong values make other ranks hang or compute wrong results.
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
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    NODE_ID,
)

#: The variables that select the interface of gloo, NCCL and TensorPipe, each in the form that stands for one only.
#: Sources: https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use,
#: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname (without "=", it is a prefix)
_INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}", "TP_SOCKET_IFNAME": "{}"}


#: Spins of a waiting OpenMP thread before it sleeps. With one rank on four idle CPUs, 10,000 cost nothing; beside four
#: busy processes, a training step takes a third of the time that it takes with OpenMP's default.
_TURNS = "10000"

#: Up to so many ranks, gloo connects all at the start. On two CPUs, that takes 0.16 s with 32 ranks, 0.53 s with 64.
_MESH = 32


def sockets(environ: Mapping[str, str], interface: str | None, leave_nccl: bool = False) -> dict[str, str]:
    """Return variables that make collectives use one network interface, without those in ``environ``.

    Without them, gloo listens where the host's name resolves to: perhaps the loopback address, out of others' reach.

    >>> sockets({"NCCL_SOCKET_IFNAME": "ib0"}, "eth1")
    {'GLOO_SOCKET_IFNAME': 'eth1', 'TP_SOCKET_IFNAME': 'eth1'}
    """
    if interface is None:
        return {}
    known = {*environ, "NCCL_SOCKET_IFNAME"} if leave_nccl else environ
    return {name: form.format(interface) for name, form in _INTERFACES.items() if name not in known}


def gloo(environ: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Return variables that make gloo connect two ranks only when they first communicate, if there are over 32 ranks.

    With fewer, a collective fails at once if a rank ends without reaching it. On demand, it would fail only at the
    timeout or, with up to three ranks, never (https://github.com/pytorch/gloo/issues/520). The barrier lets
    ``init_process_group`` return only after all ranks have called it.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#improving-initialization-time

    >>> gloo({"TORCH_GLOO_LAZY_INIT": "0"}, 64), gloo({}, 32)
    ({}, {})
    """
    if "TORCH_GLOO_LAZY_INIT" in environ or world_size <= _MESH:
        return {}
    return {
        "TORCH_GLOO_LAZY_INIT": "1",
        "TORCH_DIST_INIT_BARRIER": environ.get("TORCH_DIST_INIT_BARRIER", "1"),
    }


def waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes a rank's OpenMP threads spin only briefly while they wait for each other.

    GNU's OpenMP library in torch spins 300,000 times by default, on CPUs that working threads may need.
    Source: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html

    >>> waiting({}), waiting({"OMP_WAIT_POLICY": "active"})
    ({'GOMP_SPINCOUNT': '10000'}, {})
    """
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*environ} else {"GOMP_SPINCOUNT": _TURNS}


def nccl_knows_better(environ: Mapping[str, str], has_address: Callable[[str], bool]) -> bool:
    """Return whether NCCL's configuration file names interfaces, or there is IP over InfiniBand, which it prefers.

    Of interfaces without an address NCCL uses none.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (NCCL_CONF_FILE, NCCL_SOCKET_IFNAME).
    """
    for path in (environ.get("NCCL_CONF_FILE", ""), os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf"):
        with suppress(OSError, UnicodeDecodeError), open(path) as settings:
            if any(line.strip().startswith("NCCL_SOCKET_IFNAME") for line in settings):
                return True
    with suppress(OSError):
        return any(name.startswith("ib") and has_address(name) for name in os.listdir("/sys/class/net"))
    return False


def overlay(
    environ: Mapping[str, str], task_cpus: int, ranks_per_task: int, spark_cpus: int | None = None
) -> dict[str, str | None]:
    """Return the changes to a task's environment before ranks inherit it; ``None`` removes a variable.

    ``task_cpus`` may exceed ``spark.task.cpus``. ``spark_cpus`` is what Spark itself sets ``OMP_NUM_THREADS`` to.
    """
    return {
        "OMP_NUM_THREADS": _omp_threads(environ, task_cpus, ranks_per_task, spark_cpus),
        # Spark sets PYTHONUNBUFFERED for its own workers. It would make each write of a rank to stdout a system call.
        "PYTHONUNBUFFERED": None,
        # torchrun sets this variable too. With it, a rank ends when NCCL gives up on a collective.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def apply(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return an environment with changes applied; ``None`` removes a variable.

    >>> apply({"A": "1", "B": "2"}, {"A": None, "C": "3"})
    {'B': '2', 'C': '3'}
    """
    merged = {**environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _omp_threads(environ: Mapping[str, str], task_cpus: int, ranks_per_task: int, spark_cpus: int | None) -> str:
    """Return a rank's share of its task's CPUs, or the user's number; Spark's own number is not the user's choice."""
    already = environ.get("OMP_NUM_THREADS")
    if already is None or (spark_cpus is not None and already in (str(task_cpus), str(spark_cpus))):
        return str(max(1, task_cpus // ranks_per_task))
    return already
