"""The environment of ranks: what the run decides, and what is the same for all ranks of a node.

Standard library only: Spark's Python workers use it as well, to start the process that imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from distributor.processes import NODE_ID

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


def overlay(environ: Mapping[str, str], task_cpus: int, ranks_per_task: int) -> dict[str, str | None]:
    """What is set on top of a task's own environment, or removed from it (``None``); the user's ``env`` wins over it.

    Args:
        environ: the environment that the task has.
        task_cpus: CPUs of one task.
        ranks_per_task: ranks that share them.
    """
    return {
        "OMP_NUM_THREADS": _omp_threads(environ, task_cpus, ranks_per_task),
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


def _omp_threads(environ: Mapping[str, str], task_cpus: int, ranks_per_task: int) -> str:
    """The rank's share of CPUs, unless the user set another number.

    Spark sets ``spark.task.cpus`` for its workers by itself: where ranks share a task, that is not the user's word.
    """
    already = environ.get("OMP_NUM_THREADS")
    if already is None or already == str(task_cpus):
        return str(max(1, task_cpus // ranks_per_task))
    return already
