"""DeepSpeed's launch path: ranks start as with torchrun, and get settings for DeepSpeed, Accelerate and Transformers.

Spark provides the nodes, so this launch path needs no ``deepspeed`` runner, no hostfile and no SSH.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from distributor.launch.torchrun import Torchrun
from distributor.values.job import Function, Job, Target
from distributor.values.launch_path import BasePath
from distributor.values.outcome import Failure
from distributor.values.placement import Node, Placement
from distributor.values.plan import Call, Plan, Site

#: The environment variable with the path of the final DeepSpeed configuration, for ``distributor.runtime``.
CONFIG_PATH = "DISTRIBUTOR_DEEPSPEED_CONFIG"

_CONFIG, _GIVEN = "deepspeed.json", "deepspeed-given.json"

#: Which arguments with the configuration's path are appended to ``sys.argv``; see :class:`DeepspeedRanks`.
ScriptArguments = Literal["deepspeed", "trainer", False]

#: Match the errors of argparse and of Transformers' parser about arguments that a script does not accept.
_OPTION_UNKNOWN = re.compile(r"(unrecognized arguments:|not used by the HfArgumentParser:).*--deepspeed")
_PATH_UNKNOWN = re.compile(rf"(unrecognized arguments:|not used by the HfArgumentParser:).*{_GIVEN}")

#: Matches DeepSpeed's error about batch sizes that do not fit each other. Source: ``deepspeed/runtime/config.py``,
#: ``_batch_assertion``.
_BATCH_SIZES = re.compile(r"Check batch related parameters.*?(\d+) != (\d+) \* (\d+) \* (\d+)", re.DOTALL)


@dataclass(frozen=True)
class DeepspeedRanks(BasePath):
    """The launch path for DeepSpeed. Ranks start as with torchrun, and find DeepSpeed's configuration in a file.

    Attributes:
        config: the final configuration as JSON, for ``deepspeed.initialize``; ``None`` if there is no configuration.
        given: the same configuration, with "auto" wherever Accelerate or Transformers may fill in a value from the
            user's training settings.
        stage: the ZeRO stage of the configuration.
        precision: ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        extensions: names of the builders of the C++ or CUDA extensions that ranks load.
        extensions_timeout: maximum number of seconds that ranks of a node wait while another rank builds extensions.
        script_arguments: which arguments functions, scripts and modules get. ``"deepspeed"``: ``--deepspeed
            --deepspeed_config PATH``, or only ``--deepspeed`` if there is no configuration. ``"trainer"``:
            ``--deepspeed PATH``, which Hugging Face's Trainer takes. ``False``: none.
    """

    name: ClassVar[str] = "deepspeed"
    restarts: ClassVar[bool] = True
    uses_torch: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = ("deepspeed",)

    config: str | None = None
    given: str | None = None
    stage: int = 0
    precision: str = "fp32"
    extensions: tuple[str, ...] = ()
    extensions_timeout: float = 600.0
    script_arguments: ScriptArguments = "deepspeed"

    @property
    def needs(self) -> Mapping[str, str]:
        """The modules that ranks must be able to import, each with the name of the option that requires it."""
        return {} if self.config is None else {"deepspeed": "deepspeedConfig"}

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        """Return the environment variables that must be set before torch is imported."""
        # When DeepSpeed is imported, it asks torch for GPUs. By default, torch would initialize CUDA to answer, and
        # forked ranks could then not use GPUs. With this variable, torch asks NVML instead.
        env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        return env if use_gpu else {**env, "DS_ACCELERATOR": "cpu"}

    def advise(self, failure: Failure, job: Job) -> str:
        """Return advice on arguments that the script does not accept, and on batch sizes that DeepSpeed refuses."""
        text = f"{failure.message}\n{failure.traceback}\n{failure.log_tail}"
        return _on_arguments(text, self.script_arguments, job) or _on_batch_sizes(text, job)

    def plan(self, site: Site) -> Plan:
        """Return the plan of one node: what its ranks run, and in which environment."""
        plan, placement, node = Torchrun().plan(site), site.placement, site.node
        files = {name: text for name, text in ((_CONFIG, self.config), (_GIVEN, self.given)) if text is not None}
        paths = {name: os.path.join(site.folder, name) for name in files}
        return replace(
            plan,
            target=_with_arguments(plan.target, self.script_arguments, paths),
            node_env={**_libraries(self, paths), **plan.node_env},
            rank_env=tuple({**env, **_launcher_env(placement, node)} for env in plan.rank_env),
            files=files,
            elsewhere=_shared_memory(placement, node),
            first=Call(
                "distributor.launch.deepspeed.extensions",
                "load",
                {"names": self.extensions, "timeout": self.extensions_timeout},
            ),
        )


def _with_arguments(target: Target, kind: ScriptArguments, paths: Mapping[str, str]) -> Target:
    """Append arguments that name DeepSpeed's configuration to ``sys.argv``.

    The kind ``"deepspeed"`` is for code whose parser has the options of ``deepspeed.add_config_arguments``. The kind
    ``"trainer"`` is for code that parses ``transformers.TrainingArguments``. Such code gets the path of the
    configuration that still has "auto" values, because Hugging Face's Trainer replaces these itself.
    """
    if kind is False:
        return target
    if kind == "trainer":
        return replace(target, argv=(*target.argv, "--deepspeed", paths[_GIVEN]))
    config = ("--deepspeed_config", paths[_CONFIG]) if _CONFIG in paths else ()
    return replace(target, argv=(*target.argv, "--deepspeed", *config))


def _on_arguments(text: str, kind: ScriptArguments, job: Job) -> str:
    """Return advice if a rank failed because of the arguments in ``sys.argv``, otherwise ""."""
    if kind == "deepspeed" and "argument --deepspeed: expected one argument" in text:
        return (
            "The training code parses Hugging Face's TrainingArguments, whose --deepspeed takes the path of a "
            'configuration: pass script_arguments="trainer" (--script-arguments trainer)'
        )
    if kind == "deepspeed" and "argument --deepspeed_config: expected one argument" in text:
        if isinstance(job.target, Function):
            return (
                "The function's parser takes --deepspeed_config, but not --deepspeed: add both with "
                "deepspeed.add_config_arguments(parser), or pass script_arguments=False and read the configuration "
                "with distributor.runtime.deepspeed_config()"
            )
        return (
            "The training code takes --deepspeed_config, but not --deepspeed: pass script_arguments=False "
            "(--script-arguments none), and add --deepspeed_config PATH to the code's own arguments"
        )
    if kind is not False and _OPTION_UNKNOWN.search(text):
        return (
            "The training code does not accept DeepSpeed's options, which are appended to its arguments: pass "
            "script_arguments=False (--script-arguments none)"
        )
    if kind == "trainer" and _PATH_UNKNOWN.search(text):
        return (
            "The training code's --deepspeed takes no path, as in DeepSpeed's own examples: pass "
            'script_arguments="deepspeed", the default'
        )
    if "arguments are required: --deepspeed_config" in text and isinstance(job.target, Function):
        return (
            "A function gets --deepspeed_config only if there is a deepspeedConfig and script_arguments is "
            '"deepspeed", the default: pass them, or read the configuration with distributor.runtime.deepspeed_config()'
        )
    return ""


def _on_batch_sizes(text: str, job: Job) -> str:
    """Return advice if DeepSpeed has refused the configuration's batch sizes, otherwise ""."""
    if (found := _BATCH_SIZES.search(text)) is None:
        return ""
    total, micro, steps, ranks = map(int, found.groups())
    alone = ranks == 1 or total == micro * steps
    if alone and "transformers/" in text and not job.resources.use_gpu and job.resources.num_processes > 1:
        return (
            "Transformers counted one rank, because it did not find the others: pass use_cpu=True to "
            "TrainingArguments (--use_cpu True)"
        )
    return (
        "The batch sizes of the configuration must fit each other and the number of ranks: leave all but one of them "
        'out, or set them to "auto"'
    )


def _launcher_env(placement: Placement, node: Node) -> dict[str, str]:
    """Return the environment variables that ``deepspeed.launcher.launch`` sets in addition to torchrun's."""
    numbering = placement.numbering(node)
    return {
        "CROSS_RANK": str(numbering.group_rank),
        "CROSS_SIZE": str(numbering.groups),
        "LOCAL_SIZE": str(numbering.local_world_size),
    }


def _shared_memory(placement: Placement, node: Node) -> tuple[str, ...]:
    """Return the paths of the shared-memory files that DeepSpeed's CPU ranks leave behind, 66 MiB for each rank.

    Through these files, DeepSpeed's CPU ranks exchange tensors if ``LOCAL_SIZE`` is the number of all ranks. Otherwise,
    DeepSpeed makes no such files, and the result is empty.

    Source: ``deepspeed/ops/csrc/cpu/comm/shm.cpp``, ``shm_initialize``.
    """
    if placement.numbering(node).groups > 1:
        return ()
    prefix = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{placement.master.address}_{placement.master.port}"  # noqa: S108
    return tuple(f"{prefix}_{rank}" for rank in node.ranks)


def _libraries(asked: DeepspeedRanks, paths: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that ``accelerate launch --use_deepspeed --deepspeed_config_file`` sets.

    From these variables, Accelerate and Transformers learn that they must use DeepSpeed, and with which configuration.
    One more variable, :data:`CONFIG_PATH`, is for ``distributor.runtime``.

    Source: ``accelerate/utils/launch.py``, ``prepare_deepspeed_cmd_env``.
    """
    if not paths:  # no configuration: with these variables, the libraries would use one of their own
        return {}
    return {
        CONFIG_PATH: paths[_CONFIG],
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "none",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": paths[_GIVEN],
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(asked.stage),
        "ACCELERATE_MIXED_PRECISION": "no" if asked.precision == "fp32" else asked.precision,
    }
