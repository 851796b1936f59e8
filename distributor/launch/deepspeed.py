"""The DeepSpeed path: torchrun's ranks, with the settings that DeepSpeed, Accelerate and Transformers read.

Spark provides the nodes, so there is no ``deepspeed`` runner, no hostfile and no SSH.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from distributor.launch.torchrun import Torchrun
from distributor.values.job import Function, Target
from distributor.values.placement import Node, Placement
from distributor.values.plan import Call, Plan, Site

#: The environment variable that holds the path of the final configuration. Read by ``distributor.runtime``.
CONFIG_PATH = "DISTRIBUTOR_DEEPSPEED_CONFIG"

_CONFIG, _GIVEN = "deepspeed.json", "deepspeed-given.json"


@dataclass(frozen=True)
class DeepspeedRanks:
    """Torchrun's ranks, with DeepSpeed's configuration in the node's folder and its settings in their environment.

    Attributes:
        config: the final configuration as JSON, with which ``deepspeed.initialize`` is called; ``None`` if there is no
            configuration.
        given: the same configuration with each "auto" that a library may still fill in from the training's settings.
        stage: the ZeRO stage of the configuration.
        precision: ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        extensions: the builders of the C++ or CUDA extensions that ranks load.
        extensions_timeout: number of seconds that ranks of a node wait for the rank that builds the extensions.
        script_arguments: whether scripts and modules get ``--deepspeed --deepspeed_config PATH``.
    """

    name: ClassVar[str] = "deepspeed"
    preload: ClassVar[tuple[str, ...]] = ("deepspeed",)
    ports: ClassVar[int] = 0

    config: str | None = None
    given: str | None = None
    stage: int = 0
    precision: str = "fp32"
    extensions: tuple[str, ...] = ()
    extensions_timeout: float = 600.0
    script_arguments: bool = True

    @property
    def needs(self) -> Mapping[str, str]:
        """Return the modules that ranks must import, each with the name of the option that requires it."""
        return {} if self.config is None else {"deepspeed": "deepspeedConfig"}

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        """Return the variables that must be set before torch is imported."""
        # On import, torch is asked for GPUs. By default it would use CUDA, after which no process can be forked.
        # With this variable it asks NVML instead.
        env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        return env if use_gpu else {**env, "DS_ACCELERATOR": "cpu"}

    def plan(self, site: Site) -> Plan:
        """Return the plan of one node."""
        plan, placement, node = Torchrun().plan(site), site.placement, site.node
        files = {name: text for name, text in ((_CONFIG, self.config), (_GIVEN, self.given)) if text is not None}
        paths = {name: os.path.join(site.folder, name) for name in files}
        return replace(
            plan,
            target=_with_arguments(plan.target, paths.get(_CONFIG)) if self.script_arguments else plan.target,
            node_env={**_libraries(self, paths), **plan.node_env},
            rank_env=tuple({**env, **_launcher_env(placement, node)} for env in plan.rank_env),
            files=files,
            elsewhere=_shared_memory(placement, node),
            first=Call(
                "distributor.deepspeed.extensions",
                "load",
                {"names": self.extensions, "timeout": self.extensions_timeout},
            ),
        )


def _with_arguments(target: Target, path: str | None) -> Target:
    """Append the arguments that follow a script on the command line of DeepSpeed's own launcher.

    ``deepspeed.add_config_arguments`` parses them. A function has no command line.
    """
    if isinstance(target, Function):
        return target
    return replace(target, argv=(*target.argv, "--deepspeed", *(("--deepspeed_config", path) if path else ())))


def _launcher_env(placement: Placement, node: Node) -> dict[str, str]:
    """Return the variables that ``deepspeed.launcher.launch`` sets in addition to torchrun's."""
    return {
        "CROSS_RANK": str(node.node_rank),
        "CROSS_SIZE": str(len(placement.nodes)),
        "LOCAL_SIZE": str(node.local_world_size),
    }


def _shared_memory(placement: Placement, node: Node) -> tuple[str, ...]:
    """Return the files in which DeepSpeed's CPU ranks on one node keep 66 MiB each for collectives, and never remove.

    Source: ``deepspeed/ops/csrc/cpu/comm/shm.cpp``, ``shm_initialize``.
    """
    if len(placement.nodes) > 1:
        return ()
    prefix = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{placement.master.address}_{placement.master.port}"  # noqa: S108
    return tuple(f"{prefix}_{rank}" for rank in node.ranks)


def _libraries(asked: DeepspeedRanks, paths: Mapping[str, str]) -> dict[str, str]:
    """Return what ``accelerate launch --use_deepspeed --deepspeed_config_file`` sets. Transformers reads the same.

    Source: ``accelerate/utils/launch.py``, ``prepare_deepspeed_cmd_env``.
    """
    if not paths:  # otherwise the libraries would train with their own configuration
        return {}
    return {
        CONFIG_PATH: paths[_CONFIG],
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "none",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": paths[_GIVEN],
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(asked.stage),
        "ACCELERATE_MIXED_PRECISION": "no" if asked.precision == "fp32" else asked.precision,
    }
