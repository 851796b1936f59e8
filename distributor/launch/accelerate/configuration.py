"""Read Accelerate's configuration on the driver, in a process of its own, and check that it suits the run."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from distributor.errors import ConfigurationError
from distributor.launch.accelerate.variables import PREFIXES
from distributor.machine import bootstrap
from distributor.shipping import package
from distributor.values.environment import CONTRACT

_PATIENCE = 120.0  # seconds: Accelerate imports torch first

_NEED_GPUS = ("FSDP", "MEGATRON_LM")


def check(settings: dict[str, Any], use_gpu: bool) -> None:
    """Check that a configuration, as ``variables.answer`` returns it, suits the run; ConfigurationError if not."""
    kind, who = settings["kind"], f"the Accelerate configuration {settings['config']!r}"
    if settings["where"] != "LOCAL_MACHINE" or kind in ("XLA", "TPU"):
        where = settings["where"] if settings["where"] != "LOCAL_MACHINE" else kind
        raise ConfigurationError(f"{who} is for {where}, which is not supported: use a configuration for GPUs or CPUs")
    if kind == "DEEPSPEED":
        raise ConfigurationError(
            f"{who} asks for DeepSpeed: pass launch=DeepSpeed(config) with DeepSpeed's own configuration"
        )
    if use_gpu and settings["use_cpu"]:
        raise ConfigurationError(
            f"{who} says use_cpu: true, but the run has use_gpu=True: pass use_gpu=False, or write use_cpu: false"
        )
    if not use_gpu and kind in _NEED_GPUS:
        raise ConfigurationError(
            f"{who} asks for {kind}, which needs GPUs: pass use_gpu=True, or a configuration without {kind}"
        )


def ask(config: str, num_processes: int, use_gpu: bool) -> dict[str, Any]:
    """Make Accelerate read a configuration, and return the answer of ``variables.answer``."""
    command = bootstrap.command(package.package_root(), "accelerate", config, str(num_processes), str(use_gpu))
    unset = {key for key in os.environ if key.startswith(PREFIXES)} | {*CONTRACT}
    environ = {key: value for key, value in os.environ.items() if key not in unset}
    name = repr(config) if config else "that it found"
    try:
        done = subprocess.run(
            command,
            env={**environ, "TRANSFORMERS_VERBOSITY": "error"},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"Accelerate did not read the configuration {name} within {_PATIENCE:g} s: check how long the driver takes "
            "to import accelerate, and try again"
        ) from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise ConfigurationError(f"Accelerate rejects the configuration {name}: {reason}")
    settings: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return settings
