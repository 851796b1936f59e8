"""The launch path for Accelerate: ranks start as with torchrun, and also get the variables of ``accelerate launch``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from distributor.errors import ConfigurationError
from distributor.launch.accelerate import configuration
from distributor.launch.torchrun import Torchrun
from distributor.shipping import modules
from distributor.values.launch_path import BasePath
from distributor.values.plan import Plan, Site


@dataclass(frozen=True)
class Accelerate(BasePath):
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

    name: ClassVar[str] = "accelerate"
    restarts: ClassVar[bool] = True
    uses_torch: ClassVar[bool] = True
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({"accelerate": "launch=Accelerate()"})

    config: str | os.PathLike[str] | None = None
    variables: tuple[tuple[str, str], ...] = field(default=(), kw_only=True, repr=False)  # what resolve() has read

    def resolve(self, num_processes: int, use_gpu: bool) -> Accelerate:
        path = "" if self.config is None else os.fspath(self.config)
        if path and not Path(path).is_file():
            raise ConfigurationError(f"there is no Accelerate configuration {path!r}: pass the path of a file")
        if modules.find("accelerate") is None:
            raise ConfigurationError(
                f"launch=Accelerate() needs accelerate, which is not installed for {sys.executable}: pip install "
                "accelerate"
            )
        settings = configuration.ask(path, num_processes, use_gpu)
        configuration.check(settings, use_gpu)
        return Accelerate(settings["config"] or None, variables=tuple(sorted(settings["variables"].items())))

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        return {**Torchrun().env(use_gpu), **dict(self.variables)}

    def plan(self, site: Site) -> Plan:
        return Torchrun().plan(site)
