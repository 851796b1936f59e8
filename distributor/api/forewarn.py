"""Pure functions that return a warning, before a run starts, if it would not do what its user expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributor.shipping import package, pickling
from distributor.text.wording import size
from distributor.values.job import Function, Job

LARGE_CALL = 256 << 20  # bytes of a function's data from which a warning says so


def deepspeed_on_cpus(job: Job, environ: Mapping[str, str]) -> str | None:
    """Return a warning if a run on CPUs asks for DeepSpeed, but does not have ``launch=DeepSpeed(...)``.

    Accelerate and Transformers then silently train without it. Source: ``AcceleratorState`` in ``accelerate/state.py``.
    """
    if job.launch.name == "deepspeed" or (asked := _asked_on_cpus("deepspeed", job, environ)) is None:
        return None
    return (
        f"{asked} asks for DeepSpeed, but with use_gpu=False, Accelerate and Transformers train without it unless "
        "DeepSpeed launches the run: pass launch=DeepSpeed(config), or do without DeepSpeed"
    )


def fsdp_on_cpus(job: Job, environ: Mapping[str, str]) -> str | None:
    """Return a warning if a run on CPUs asks Accelerate or Transformers for FSDP: both would silently use DDP.

    Sources: ``accelerate/state.py``, which sets FSDP up for GPUs only; ``transformers/training_args.py`` (``--fsdp``).

    >>> fsdp_on_cpus(job, {"ACCELERATE_USE_FSDP": "true"})  # doctest: +SKIP
    'ACCELERATE_USE_FSDP asks for FSDP, for which Accelerate and Transformers need GPUs: ...'
    """
    if (asked := _asked_on_cpus("fsdp", job, environ)) is None:
        return None
    return (
        f"{asked} asks for FSDP, for which Accelerate and Transformers need GPUs: on CPUs (use_gpu=False) they "
        "silently train with DDP instead. Pass use_gpu=True, or do without FSDP"
    )


def large_call(job: Job, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return a warning if a function has much data with it, which each run sends to each node."""
    if (total := package.call_size(job)) <= LARGE_CALL:
        return None
    part = pickling.largest_part(function, args, kwargs)
    mainly = "" if part is None else f", mainly {part[0]} ({size(part[1])})"
    return (
        f"{job.title} has {size(total)} of data with it{mainly}, which each run sends to each node: save the data to "
        "a file that all nodes can read, and load it inside the function"
    )


def _asked_on_cpus(library: str, job: Job, environ: Mapping[str, str]) -> str | None:
    """Return the environment variable or script argument with which a run on CPUs asks for ``library``, if any."""
    if job.resources.use_gpu:
        return None
    variable, option = f"ACCELERATE_USE_{library.upper()}", f"--{library}"
    if {**environ, **job.env}.get(variable, "").lower() == "true":
        return variable
    argv = () if isinstance(job.target, Function) else job.target.argv
    return option if any(word.partition("=")[0] == option for word in argv) else None
