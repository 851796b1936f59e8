"""``Accelerate``, the object that users pass as ``launch=``. It reads and checks a configuration file on the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributor.errors import ConfigurationError
from distributor.launch.accelerate.path import AccelerateRanks
from distributor.launch.accelerate.variables import PREFIXES
from distributor.machine import bootstrap
from distributor.shipping import modules, package
from distributor.values.environment import CONTRACT

#: Number of seconds that Accelerate, which imports torch first, may take to read a configuration.
_PATIENCE = 120.0

#: Kinds of training that need GPUs.
_NEED_GPUS = ("FSDP", "MEGATRON_LM")


@dataclass(frozen=True)
class Accelerate:
    """The launch path that starts ranks as ``accelerate launch`` does, with a configuration file of Accelerate.

    Ranks get the environment variables that ``accelerate launch`` would set. The run itself sets the number of ranks,
    and the ports, threads and devices that they use; the file's values for these (such as ``num_processes`` and
    ``gpu_ids``) are ignored. A file for a kind of training that the run cannot do is an error: for example, a file with
    ``use_cpu: true`` for a run with GPUs, or a file for TPUs.

    Args:
        config: path of Accelerate's configuration file on the driver. ``None`` (default): the file
            ``~/.cache/huggingface/accelerate/default_config.yaml``, which Accelerate finds by itself. If there is no
            such file, Accelerate's default values apply.

    Example:
        >>> from distributor import Distributor
        >>> Distributor(8, launch=Accelerate("fsdp.yaml")).run("train.py")  # doctest: +SKIP
    """

    config: str | os.PathLike[str] | None = None

    def resolve(self, num_processes: int, use_gpu: bool) -> AccelerateRanks:
        """Read the Accelerate configuration, and return the launch path with the configuration's environment variables.

        Raises:
            ConfigurationError: the configuration file does not exist or does not suit the run, Accelerate rejects the
                file or takes too long to read it, or Accelerate is not installed.
        """
        path = "" if self.config is None else os.fspath(self.config)
        if path and not Path(path).is_file():
            raise ConfigurationError(f"there is no Accelerate configuration {path!r}: pass the path of a file")
        if modules.find("accelerate") is None:
            raise ConfigurationError(
                f"launch=Accelerate() needs accelerate, which is not installed for {sys.executable}: pip install "
                "accelerate"
            )
        told = _ask(path, num_processes, use_gpu)
        check(told, use_gpu)
        return AccelerateRanks(told["config"], tuple(sorted(told["variables"].items())))


def check(told: dict[str, Any], use_gpu: bool) -> None:
    """Check that an Accelerate configuration suits the run.

    Args:
        told: what Accelerate has read from the configuration, as
            :func:`distributor.launch.accelerate.variables.answer` returns it.
        use_gpu: whether the run has GPUs.

    Raises:
        ConfigurationError: the configuration does not suit the run, for instance because it is for CPUs and the run has
            GPUs.
    """
    kind, who = told["kind"], f"the Accelerate configuration {told['config']!r}"
    if told["where"] != "LOCAL_MACHINE" or kind in ("XLA", "TPU"):
        where = told["where"] if told["where"] != "LOCAL_MACHINE" else kind
        raise ConfigurationError(f"{who} is for {where}, which is not supported: use a configuration for GPUs or CPUs")
    if kind == "DEEPSPEED":
        raise ConfigurationError(
            f"{who} asks for DeepSpeed: pass launch=DeepSpeed(config) with DeepSpeed's own configuration"
        )
    if use_gpu and told["use_cpu"]:
        raise ConfigurationError(
            f"{who} says use_cpu: true, but the run has use_gpu=True: pass use_gpu=False, or write use_cpu: false"
        )
    if not use_gpu and kind in _NEED_GPUS:
        raise ConfigurationError(
            f"{who} asks for {kind}, which needs GPUs: pass use_gpu=True, or a configuration without {kind}"
        )


def _ask(config: str, num_processes: int, use_gpu: bool) -> dict[str, Any]:
    """Make Accelerate read a configuration, and return the answer of ``variables.answer``.

    Raises:
        ConfigurationError: Accelerate rejects the configuration, or takes too long to read it.
    """
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
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told
