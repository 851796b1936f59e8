"""DeepSpeed's launch path: as torchrun's, with settings for DeepSpeed, Accelerate and Transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from distributor.errors import ConfigurationError
from distributor.launch.deepspeed import reading
from distributor.launch.deepspeed.config import ResolvedConfig
from distributor.launch.torchrun import Torchrun
from distributor.values.checks import check_seconds
from distributor.values.job import Function, Job, Target
from distributor.values.launch_path import BasePath
from distributor.values.outcome import Failure
from distributor.values.placement import Share
from distributor.values.plan import Call, Plan, Site

CONFIG_PATH = "DISTRIBUTOR_DEEPSPEED_CONFIG"  # of the final configuration, for ``distributor.runtime``

_CONFIG, _GIVEN = "deepspeed.json", "deepspeed-given.json"

ScriptArguments = Literal["deepspeed", "trainer", False]

#: Errors of argparse and of Transformers' parser.
_OPTION_UNKNOWN = re.compile(r"(unrecognized arguments:|not used by the HfArgumentParser:).*--deepspeed")
_PATH_UNKNOWN = re.compile(rf"(unrecognized arguments:|not used by the HfArgumentParser:).*{_GIVEN}")

#: Source: ``deepspeed/runtime/config.py``, ``_batch_assertion``.
_BATCH_SIZES = re.compile(r"Check batch related parameters.*?(\d+) != (\d+) \* (\d+) \* (\d+)", re.DOTALL)


@dataclass(frozen=True)
class DeepSpeed(BasePath):
    """The launch path that trains with DeepSpeed.

    Args:
        config: DeepSpeed's configuration, as a dict or the path of a JSON or YAML file on the driver;
            :func:`distributor.zero` makes such a dict. ``"auto"`` values are filled in. A training function reads the
            final configuration with ``distributor.runtime.deepspeed_config()``; the run leaves no copy of it behind.
            ``None`` (default): the training code has its own configuration.
        auto: values for ``"auto"`` settings: ``micro_batch_size``, ``gradient_accumulation_steps``, ``learning_rate``,
            ``betas``, ``eps``, ``weight_decay``, ``gradient_clipping``, ``warmup_steps``, ``total_steps``,
            ``precision`` (``"fp32"``, ``"fp16"``, ``"bf16"``) and ``hidden_size`` (of the model; ZeRO's bucket sizes
            are computed from it). If no value is given here, a batch size is computed from the other batch sizes, if
            they are given. Bucket sizes get DeepSpeed's defaults. Everything else gets the defaults of Hugging Face's
            ``TrainingArguments``, except that ``warmup_steps`` defaults to 1 and ``total_steps`` has no default. For
            Accelerate and Transformers, only the values given here are filled in, since these libraries fill in the
            others from the model and their own settings.
        script_arguments: what is appended to ``sys.argv`` of functions, scripts and modules. ``"deepspeed"``
            (default): ``--deepspeed --deepspeed_config PATH``, as in PySpark, or only ``--deepspeed`` if there is no
            configuration. ``"trainer"``: ``--deepspeed PATH``, for code that parses ``TrainingArguments`` of
            Transformers or TRL. ``False``: nothing.
        extensions_timeout: maximum number of seconds (default 600) that ranks wait while another rank of their node
            compiles DeepSpeed's extensions. Extensions are compiled on first use, and are kept in
            ``~/.cache/distributor`` or in ``TORCH_EXTENSIONS_DIR``.

    Example:
        >>> from distributor import Distributor, zero
        >>> Distributor(8, launch=DeepSpeed(zero(3))).run(train)  # doctest: +SKIP
    """

    name: ClassVar[str] = "deepspeed"
    restarts: ClassVar[bool] = True
    uses_torch: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = ("deepspeed",)
    spark_prefix: ClassVar[str] = "deepspeed"

    config: str | os.PathLike[str] | Mapping[str, Any] | None = None
    auto: Mapping[str, Any] | None = None
    script_arguments: ScriptArguments = "deepspeed"
    extensions_timeout: float = 600.0
    resolved: ResolvedConfig | None = field(default=None, kw_only=True, repr=False)  # resolve() makes it from config

    def resolve(self, num_processes: int, use_gpu: bool) -> DeepSpeed:
        timeout = check_seconds("extensions_timeout", self.extensions_timeout, 1)
        kind = _check_arguments(self.script_arguments, self.config is not None)
        if self.config is None:
            if self.auto is not None:
                raise ConfigurationError(
                    f"auto={dict(self.auto)!r} fills in a deepspeedConfig, but there is none: pass one"
                )
            return DeepSpeed(script_arguments=kind, extensions_timeout=timeout)
        config, auto = reading.read(self.config), self.auto or {}
        resolved = ResolvedConfig.of(config, num_processes, use_gpu, auto)
        source = json.loads(json.dumps(config)) if isinstance(self.config, Mapping) else str(os.fspath(self.config))
        return DeepSpeed(source, None if self.auto is None else _portable(auto), kind, timeout, resolved=resolved)

    @property
    def needs(self) -> Mapping[str, str]:
        return {} if self.config is None else {"deepspeed": "deepspeedConfig"}

    @property
    def deepspeed_config(self) -> str | None:
        return None if self.resolved is None else self.resolved.final

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        # On import, DeepSpeed asks torch for GPUs unless it is told. Torch would initialize CUDA by default, and forked
        # ranks could then use no GPUs. With the first variable, it asks NVML instead, which knows no MIG devices.
        return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "DS_ACCELERATOR": "cuda" if use_gpu else "cpu"}

    def advise(self, failure: Failure, job: Job) -> str:
        text = f"{failure.message}\n{failure.traceback}\n{failure.log_tail}"
        return _on_arguments(text, self.script_arguments, job) or _on_batch_sizes(text, job)

    def plan(self, site: Site) -> Plan:
        plan, placement = Torchrun().plan(site), site.placement
        resolved = self.resolved
        files = {} if resolved is None else {_CONFIG: resolved.final, _GIVEN: resolved.given}
        paths = {name: os.path.join(site.folder, name) for name in files}
        return replace(
            plan,
            target=_with_arguments(plan.target, self.script_arguments, paths),
            node_env={**_libraries(resolved, paths), **plan.node_env},
            rank_env=tuple({**env, **_launcher_env(placement)} for env in plan.rank_env),
            files=files,
            elsewhere=_shared_memory(placement),
            first=Call(
                "distributor.launch.deepspeed.extensions",
                "load",
                {"names": () if resolved is None else resolved.extensions, "timeout": self.extensions_timeout},
            ),
        )


def _portable(auto: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``auto`` as plain data, without what JSON cannot express: no setting used it."""
    portable = {}
    for name, value in auto.items():
        with suppress(TypeError, ValueError):
            portable[name] = json.loads(json.dumps(value))
    return portable


def _check_arguments(kind: Any, has_config: bool) -> ScriptArguments:
    if kind is not False and kind not in ("deepspeed", "trainer"):
        raise ConfigurationError(f"script_arguments must be 'deepspeed', 'trainer' or False, not {kind!r}")
    if kind == "trainer" and not has_config:
        raise ConfigurationError(
            "script_arguments='trainer' passes a deepspeedConfig to the script, but there is none: pass one"
        )
    checked: ScriptArguments = kind
    return checked


def _with_arguments(target: Target, kind: ScriptArguments, paths: Mapping[str, str]) -> Target:
    if kind is False:
        return target
    if kind == "trainer":
        # Hugging Face's Trainer itself replaces "auto".
        return replace(target, argv=(*target.argv, "--deepspeed", paths[_GIVEN]))
    config = ("--deepspeed_config", paths[_CONFIG]) if _CONFIG in paths else ()
    return replace(target, argv=(*target.argv, "--deepspeed", *config))


def _on_arguments(text: str, kind: ScriptArguments, job: Job) -> str:
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
    if (sizes := _BATCH_SIZES.search(text)) is None:
        return ""
    total, micro, steps, ranks = map(int, sizes.groups())
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


def _launcher_env(placement: Share) -> dict[str, str]:
    """Return what ``deepspeed.launcher.launch`` sets in addition to torchrun's variables."""
    numbering = placement.numbering
    return {
        "CROSS_RANK": str(numbering.group_rank),
        "CROSS_SIZE": str(numbering.groups),
        "LOCAL_SIZE": str(numbering.local_world_size),
    }


def _shared_memory(placement: Share) -> tuple[str, ...]:
    """Return the shared-memory files that DeepSpeed's CPU ranks leave behind, 66 MiB for each rank."""
    # Ranks exchange tensors by these files if ``LOCAL_SIZE`` is the number of all ranks. Source: ``shm_initialize`` in
    # ``deepspeed/ops/csrc/cpu/comm/shm.cpp``.
    if placement.numbering.groups > 1:
        return ()
    prefix = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{placement.master.address}_{placement.master.port}"  # noqa: S108
    return tuple(f"{prefix}_{rank}" for rank in placement.node.ranks)


def _libraries(resolved: ResolvedConfig | None, paths: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which Accelerate and Transformers learn that they must use DeepSpeed."""
    if resolved is None:  # no configuration: with these variables, the libraries would use one of their own
        return {}
    # Source: ``accelerate/utils/launch.py``, ``prepare_deepspeed_cmd_env``.
    return {
        CONFIG_PATH: paths[_CONFIG],
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "none",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": paths[_GIVEN],
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(resolved.stage),
        "ACCELERATE_MIXED_PRECISION": "no" if resolved.precision == "fp32" else resolved.precision,
    }
