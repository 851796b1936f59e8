"""The environment variables that a run sets in its ranks.

This module uses the standard library only, because Spark's Python workers also import it. They need it to start the
process that imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress

#: The environment variable that marks the processes of one node of a run: its launcher, ranks and their children.
NODE_ID = "DISTRIBUTOR_NODE_ID"

#: If the environment variable is "0", ranks do not check that they see the GPUs that they were promised.
CHECK_GPUS = "DISTRIBUTOR_CHECK_GPUS"


def job_id(run_id: str, attempt: int) -> str:
    """Return the ID of a job of a run; ``attempt`` is the job's first attempt. A run's first job has the run's ID.

    >>> job_id("3f2a", 0), job_id("3f2a", 2)
    ('3f2a', '3f2a-2')
    """
    return f"{run_id}-{attempt}" if attempt else run_id


def node_id(job_id: str, leader: int) -> str:
    """Return the ID of a node, which the processes of the node have in the environment variable :data:`NODE_ID`.

    These processes are the node's launcher, companions, ranks and their children, but not its agent.

    ``leader`` is the partition of the Spark task that runs the node's agent.
    """
    return f"{job_id}.{leader}"


def is_of_earlier_job(mark: str, run_id: str, attempt: int) -> bool:
    """Return whether ``mark`` is the ID of a node of an earlier job: one whose first attempt came before ``attempt``.

    >>> is_of_earlier_job("3f2a.0", "3f2a", 2), is_of_earlier_job("3f2a-2.0", "3f2a", 2)
    (True, False)
    """
    found = re.fullmatch(rf"{re.escape(run_id)}(?:-(\d+))?\.\d+", mark)
    return found is not None and int(found[1] or 0) < attempt


#: Variables that only the run sets. Users cannot set them with ``env=``, since wrong values would make the other ranks
#: hang or compute wrong results.
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

#: Variables that select the network interface of gloo, NCCL and TensorPipe, each with the format of a value that stands
#: for one interface only.
#: Sources: https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use,
#: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname (without "=", it is a prefix)
_INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}", "TP_SOCKET_IFNAME": "{}"}


#: Number of times that a waiting OpenMP thread spins before it sleeps. Measured with one rank on four CPUs: 10,000
#: spins cost nothing if nothing else runs. While four other processes are busy, a training step takes a third of the
#: time that it takes with OpenMP's default.
_TURNS = "10000"

#: With up to this number of ranks, gloo connects all ranks to each other when a process group starts. On two CPUs,
#: the connections take 0.16 s with 32 ranks, and 0.53 s with 64.
_MESH = 32


def sockets(environ: Mapping[str, str], interface: str | None, leave_nccl: bool = False) -> dict[str, str]:
    """Return variables that make collectives use one network interface, without those that ``environ`` already sets.

    Without these variables, gloo listens on the address that the host's name resolves to. This may be the loopback
    address, which other hosts cannot reach.

    Args:
        environ: the variables that are already set.
        interface: name of the interface; ``None`` sets nothing.
        leave_nccl: whether NCCL itself chooses its interface; see :func:`nccl_knows_better`.

    >>> sockets({"NCCL_SOCKET_IFNAME": "ib0"}, "eth1")
    {'GLOO_SOCKET_IFNAME': 'eth1', 'TP_SOCKET_IFNAME': 'eth1'}
    """
    if interface is None:
        return {}
    known = {*environ, "NCCL_SOCKET_IFNAME"} if leave_nccl else environ
    return {name: form.format(interface) for name, form in _INTERFACES.items() if name not in known}


def gloo(environ: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Return variables that make gloo connect two ranks only when they first communicate, if there are over 32 ranks.

    With 32 ranks or fewer, no variable is set, and gloo connects all ranks at the start, which is torch's default. In
    this case, if a rank ends without reaching a collective, the collective fails at once on the other ranks. If ranks
    connected only on demand, the collective would fail only at the timeout of the process group or, with three ranks or
    fewer, never (https://github.com/pytorch/gloo/issues/520).

    ``TORCH_GLOO_LAZY_INIT`` lets ranks connect on demand. ``TORCH_DIST_INIT_BARRIER`` makes ``init_process_group``
    return only after all ranks have called it.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#improving-initialization-time

    Args:
        environ: the variables that are already set. They are not changed. If ``TORCH_GLOO_LAZY_INIT`` is among them,
            nothing is added.
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


def waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes a rank's OpenMP threads spin only briefly while they wait for each other.

    In GNU's OpenMP library, which is part of torch, a thread that waits for others spins 300,000 times by default, and
    then sleeps. If other processes use some of the CPUs, spinning threads occupy the CPUs that working threads need.
    Source: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html

    Args:
        environ: the variables that are already set. If they define how threads wait, nothing is added.

    >>> waiting({}), waiting({"OMP_WAIT_POLICY": "active"})
    ({'GOMP_SPINCOUNT': '10000'}, {})
    """
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*environ} else {"GOMP_SPINCOUNT": _TURNS}


def nccl_knows_better(environ: Mapping[str, str]) -> bool:
    """Return whether NCCL itself chooses its network interface better than this package would.

    NCCL should choose its network interface itself if its configuration file names interfaces, or if the machine has
    IP over InfiniBand, which NCCL prefers to other networks.
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
    """Return the variables to change in a task's environment before ranks inherit it; ``None`` removes a variable.

    The caller applies the user's ``env`` after the returned changes, so ``env`` takes precedence.

    Args:
        environ: the task's environment.
        task_cpus: number of CPUs of each task of the run. With stage-level scheduling, it can exceed
            ``spark.task.cpus``.
        ranks_per_task: number of ranks that share a task's CPUs.
        spark_cpus: the value of ``spark.task.cpus`` if Spark itself sets ``OMP_NUM_THREADS`` to this value in its
            workers; ``None`` (default) if it does not.
    """
    return {
        "OMP_NUM_THREADS": _omp_threads(environ, task_cpus, ranks_per_task, spark_cpus or task_cpus),
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


def _omp_threads(environ: Mapping[str, str], task_cpus: int, ranks_per_task: int, spark_cpus: int) -> str:
    """Return the value of ``OMP_NUM_THREADS``: a rank's share of its task's CPUs, unless the user has set a number.

    Spark itself sets ``OMP_NUM_THREADS`` to ``spark.task.cpus`` in its workers, even if a task has more CPUs. So this
    value does not count as the user's choice, and is replaced.
    """
    already = environ.get("OMP_NUM_THREADS")
    if already is None or already in (str(task_cpus), str(spark_cpus)):
        return str(max(1, task_cpus // ranks_per_task))
    return already
