"""What a run would do otherwise than its user expects, found before it starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from distributor.values.job import Function, Job


def deepspeed_on_cpus(job: Job, environ: Mapping[str, str]) -> str | None:
    """Return a warning if a run on CPUs asks Accelerate or Transformers for DeepSpeed, but not its launch path.

    They then train without it in silence. Source: ``accelerate/state.py``, ``AcceleratorState``.
    """
    if job.resources.use_gpu or job.launch.name == "deepspeed":
        return None
    argv = () if isinstance(job.target, Function) else job.target.argv
    asked = next((word.partition("=")[0] for word in argv if word.partition("=")[0] == "--deepspeed"), None)
    if {**environ, **job.env}.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        asked = "ACCELERATE_USE_DEEPSPEED"
    if asked is None:
        return None
    return (
        f"{asked} asks for DeepSpeed, but with use_gpu=False Accelerate and Transformers train without it unless "
        "DeepSpeed launches the run: pass launch=DeepSpeed(config), or do without it"
    )


def fsdp_on_cpus(job: Job, environ: Mapping[str, str]) -> str | None:
    """Return a warning if a run on CPUs asks Accelerate or Transformers for FSDP; they would use DDP in silence.

    Source: ``accelerate/state.py`` sets FSDP up for GPUs only; ``transformers/training_args.py`` has ``--fsdp``.

    Args:
        job: the run's job.
        environ: what ranks inherit beside the job's own variables.

    Example:
        >>> fsdp_on_cpus(job, {"ACCELERATE_USE_FSDP": "true"})  # doctest: +SKIP
        'ACCELERATE_USE_FSDP asks for FSDP, for which Accelerate and Transformers need GPUs: ...'
    """
    if job.resources.use_gpu:
        return None
    argv = () if isinstance(job.target, Function) else job.target.argv
    asked = next((word.partition("=")[0] for word in argv if word.partition("=")[0] == "--fsdp"), None)
    if {**environ, **job.env}.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        asked = "ACCELERATE_USE_FSDP"
    if asked is None:
        return None
    return (
        f"{asked} asks for FSDP, for which Accelerate and Transformers need GPUs: on CPUs (use_gpu=False) they train "
        "with DDP instead, and do not say so. Pass use_gpu=True, or do without FSDP"
    )
