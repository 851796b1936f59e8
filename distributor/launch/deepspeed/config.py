"""DeepSpeed's configuration as data, which the driver checks and completes. Imports no torch.

Source: https://www.deepspeed.ai/docs/config-json/, and ``deepspeed/runtime/config.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from distributor.errors import ConfigurationError
from distributor.launch.deepspeed.reading import Config, copy_of, plain
from distributor.text import notices
from distributor.values.checks import check_count, one_of

AUTO = "auto"

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"

TOTAL_STEPS = "scheduler.params.total_num_steps"

STAGES = {0: "none", 1: "optimizer states", 2: "+ gradients", 3: "+ parameters"}

#: The names that ``auto=`` accepts, with Hugging Face's defaults:
#: https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments
FILL: dict[str, Any] = {
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "gradient_clipping": 1.0,
    "warmup_steps": 1,  # DeepSpeed requires at least 1
    "total_steps": None,  # no default
    "precision": "fp32",
    "hidden_size": None,  # without it, ZeRO's buckets get DeepSpeed's sizes
}

#: The paths at which "auto" is filled in, each with its entry of :data:`FILL`.
_FILLED = {
    "gradient_clipping": "gradient_clipping",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "betas",
    "optimizer.params.eps": "eps",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    TOTAL_STEPS: "total_steps",
}

#: ZeRO's bucket sizes in elements: as Hugging Face's Trainer computes them from the hidden size, and DeepSpeed's
#: defaults. The Trainer leaves out ``allgather_bucket_size``, which is as ``reduce_bucket_size`` here. Source:
#: ``transformers/integrations/deepspeed.py``, ``trainer_config_finalize``.
_BUCKETS: dict[str, tuple[Callable[[int], int], int]] = {
    "zero_optimization.reduce_bucket_size": (lambda hidden: hidden * hidden, 500_000_000),
    "zero_optimization.allgather_bucket_size": (lambda hidden: hidden * hidden, 500_000_000),
    "zero_optimization.stage3_prefetch_bucket_size": (lambda hidden: int(0.9 * hidden * hidden), 50_000_000),
    "zero_optimization.stage3_param_persistence_threshold": (lambda hidden: 10 * hidden, 100_000),
}

#: Top-level names that DeepSpeed reads. It ignores others, which may be misspelt, or belong to other programs.
_SECTIONS = (
    *(
        TRAIN,
        MICRO,
        ACCUMULATION,
        "optimizer",
        "scheduler",
        "zero_optimization",
        "fp16",
        "bf16",
        "torch_autocast",
        "amp",
    ),
    *("gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "steps_per_print"),
    *("communication_data_type", "data_types", "wall_clock_breakdown", "dump_state", "memory_breakdown", "autotuning"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "activation_checkpointing", "sparse_attention"),
    *(
        "flops_profiler",
        "tensorboard",
        "wandb",
        "comet",
        "csv_monitor",
        "comms_logger",
        "aio",
        "checkpoint",
        "pipeline",
    ),
    *("elasticity", "compression_training", "data_efficiency", "curriculum_learning", "progressive_layer_drop"),
    *("tensor_parallel", "expert_parallel", "sequence_parallel_size", "data_parallel_size", "hybrid_engine", "compile"),
)

_SLIP = 0.8  # from this similarity on (a ratio of difflib), a name is a misspelling
_SURE_SLIP = 0.93  # in zero_optimization, whose names resemble each other and are not all listed

#: Other tools' names of DeepSpeed's settings.
_OTHER_NAMES = {
    "batch_size": TRAIN,
    "micro_batch_size": MICRO,
    "grad_clip": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "lr": "optimizer.params.lr",
    "learning_rate": "optimizer.params.lr",
    "zero": "zero_optimization",
}

#: Names in ``zero_optimization``, where DeepSpeed refuses others, but only once every rank is up.
_ZERO = (
    *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions"),
    *("allgather_bucket_size", "overlap_comm", "offload_param", "offload_optimizer", "sub_group_size", "cpu_offload"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
    *("stage3_gather_fp16_weights_on_model_save",),
    *("round_robin_gradients", "ignore_unused_parameters", "zero_hpz_partition_size", "zero_quantized_weights"),
    *("zero_quantized_gradients", "memory_efficient_linear", "load_from_fp32_weights", "elastic_checkpoint"),
)


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration that the driver has read, checked and completed, and what nodes have to know of it."""

    final: str  # JSON, for deepspeed.initialize
    given: str  # the same, with "auto" where Accelerate or Transformers may fill in a value from their own settings
    stage: int = 0  # of ZeRO
    precision: str = "fp32"  # or "fp16", "bf16"
    extensions: tuple[str, ...] = ()  # builders of the C++ and CUDA extensions that ranks load

    @classmethod
    def of(cls, config: Config, world_size: int, use_gpu: bool, auto: Mapping[str, Any]) -> ResolvedConfig:
        """Check and complete a configuration; ConfigurationError if it is wrong or does not fit ``world_size``."""
        check(config, world_size)
        if TRAIN not in config and MICRO not in config:
            notices.logger.warning(
                "deepspeedConfig has no batch size, which deepspeed.initialize requires: add %s or %s",
                TRAIN,
                MICRO,
            )
        final = fill(config, world_size, auto)
        check(final, world_size)
        return cls(
            json.dumps(final),
            json.dumps(fill(config, world_size, auto, guess=False)),
            zero_stage(final),
            precision(final),
            extensions(final, use_gpu),
        )


def check(config: Config, world_size: int) -> None:
    """Refuse mistakes that DeepSpeed would find only once all ranks have started, or never.

    ``"auto"`` is accepted where :func:`fill`, DeepSpeed, Transformers or Accelerate replaces it.
    """
    for name in config:
        close = _meant(name, _SECTIONS)
        if close is not None:
            raise ConfigurationError(
                f"deepspeedConfig has {name!r}, which DeepSpeed would silently ignore: did you mean {close!r}?"
            )
    zero = config.get("zero_optimization", {})
    for name in zero if isinstance(zero, dict) else ():
        close = _meant(name, _ZERO)
        if close is not None and difflib.SequenceMatcher(None, name, close).ratio() > _SURE_SLIP:
            raise ConfigurationError(f"deepspeedConfig: zero_optimization has {name!r}: did you mean {close!r}?")
    for name in ("optimizer", "scheduler", "fp16", "bf16", "pipeline", "tensor_parallel", "checkpoint"):
        _section(config, name)
    for name in ("fp16", "bf16"):
        enabled = _section(config, name).get("enabled", False)
        if not isinstance(enabled, bool) and enabled != AUTO:
            raise ConfigurationError(f"deepspeedConfig: {name}.enabled must be true or false, not {enabled!r}")
    if _enabled(config, "fp16") and _enabled(config, "bf16"):
        raise ConfigurationError("deepspeedConfig enables both fp16 and bf16: choose one of them")
    _check_optimizer(config)
    stage = zero_stage(config)
    _check_offload(config, stage)
    _check_batches(config, world_size)


def _meant(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that ``name`` probably means, if ``name`` is not known and resembles one."""
    if name in known:
        return None
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    return next(iter(difflib.get_close_matches(name, known, 1, _SLIP)), None)


def fill(config: Config, world_size: int, auto: Mapping[str, Any], guess: bool = True) -> Config:
    """Return the final configuration, with ``"auto"`` filled in as Hugging Face's Trainer does it.

    ``"auto"`` stays where DeepSpeed itself understands it, and for :data:`TOTAL_STEPS`, which only Transformers or
    Accelerate can fill in. With ``guess=False``, only values in ``auto`` are filled in, since libraries such as these
    take better values than defaults from their own settings.

    >>> fill({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, 2, {})
    {'train_batch_size': 8, 'train_micro_batch_size_per_gpu': 4}
    """
    for name in auto:
        if name not in FILL:
            raise ConfigurationError(f"auto= does not accept the name {name!r}: use one of {', '.join(FILL)}")
    final = copy_of(config)
    _fill_batches(final, world_size, auto, guess)
    for path, name in _FILLED.items():
        if name in auto or (guess and FILL[name] is not None):
            _fill(final, path, auto.get(name, FILL[name]), name in auto, name)
    hidden = auto.get("hidden_size")
    if hidden is not None:
        check_count("auto: hidden_size", hidden)
    for path, (size, default) in _BUCKETS.items():
        if guess or hidden is not None:
            _fill(final, path, default if hidden is None else size(hidden), False, "hidden_size")
    precision = one_of("fp32", "fp16", "bf16")("auto: precision", auto.get("precision", FILL["precision"]))
    for name in ("fp16", "bf16"):
        if guess or "precision" in auto:
            _fill(final, f"{name}.enabled", precision == name, "precision" in auto, "precision")
    if not guess:
        return final
    _fill(final, "scheduler.params.warmup_min_lr", 0, False, "")
    left = [path for path in unfilled(final) if path != TOTAL_STEPS]
    if left:
        raise ConfigurationError(
            f"deepspeedConfig: {left[0]} is 'auto', but no value can be derived for it: replace 'auto' with a value"
        )
    return final


def unfilled(config: Config) -> list[str]:
    """Return the paths of "auto" for which DeepSpeed has no default; after :func:`fill`, only :data:`TOTAL_STEPS`."""
    return [
        path
        for path, value in _leaves(config)
        if value == AUTO and ("." not in path or path.startswith(("optimizer.params.", "scheduler.params.")))
    ]


def zero_stage(config: Config) -> int:
    """Return the ZeRO stage of a configuration; 0 if it has none."""
    zero = config.get("zero_optimization", {})
    if isinstance(zero, bool):  # an older form: true means stage 1
        return int(zero)
    stage = _section(config, "zero_optimization").get("stage", 0)
    if not is_stage(stage):
        stages = ", ".join(f"{number} ({split})" for number, split in STAGES.items())
        raise ConfigurationError(
            f"deepspeedConfig: zero_optimization.stage is {stage!r}, but must be one of these stages "
            f"(in brackets: what each splits among ranks): {stages}"
        )
    return int(stage)


def is_stage(value: Any) -> bool:
    """Return whether a value, which may be of any type, is the number of a ZeRO stage."""
    return isinstance(value, Real) and not isinstance(value, bool) and value in STAGES


def precision(config: Config) -> str:
    """Return ``"fp16"``, ``"bf16"`` or, if neither is enabled, ``"fp32"``."""
    return next((name for name in ("fp16", "bf16") if _enabled(config, name)), "fp32")


def extensions(config: Config, use_gpu: bool) -> tuple[str, ...]:
    """Return the builders, in ``deepspeed.ops.op_builder``, of the extensions that a run loads.

    Source: ``deepspeed/runtime/engine.py`` (``_configure_basic_optimizer``), ``deepspeed/comm/torch.py``.

    >>> extensions({"optimizer": {"type": "AdamW"}}, use_gpu=False)
    ('ShareMemCommBuilder', 'FusedAdamBuilder')
    """
    optimizer = _section(config, "optimizer")
    kind = str(optimizer.get("type", "")).lower()
    offloads = [_offload(config, "offload_optimizer"), _offload(config, "offload_param")]
    on_cpu = offloads[0] in ("cpu", "nvme")
    builders = [] if use_gpu else ["ShareMemCommBuilder"]
    if kind in ("adam", "adamw") and not _section(optimizer, "params").get("torch_adam"):
        builders.append("CPUAdamBuilder" if on_cpu else "FusedAdamBuilder")
    elif kind == "lion":
        builders.append("CPULionBuilder" if on_cpu else "FusedLionBuilder")
    elif kind == "adagrad" and on_cpu:
        builders.append("CPUAdagradBuilder")
    elif kind == "lamb":
        builders.append("FusedLambBuilder")
    if "nvme" in offloads:
        builders.append("AsyncIOBuilder")
    return tuple(builders)


def _section(config: Config, name: str) -> Config:
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise ConfigurationError(f"deepspeedConfig: {name} must be a mapping, not {type(section).__name__} {section!r}")
    return section


def _enabled(config: Config, name: str) -> bool:
    return _section(config, name).get("enabled") is True


def _check_optimizer(config: Config) -> None:
    if "optimizer" not in config:
        return
    kind = config["optimizer"].get("type")
    if not isinstance(kind, str):
        raise ConfigurationError(
            f"deepspeedConfig: optimizer.type must be a name such as 'AdamW', not {kind!r}. To pass an optimizer to "
            "deepspeed.initialize, leave the section out"
        )
    params = _section(config["optimizer"], "params")
    rate = params.get("lr", AUTO)
    if rate != AUTO and (isinstance(rate, bool) or not isinstance(rate, (int, float))):
        raise ConfigurationError(f"deepspeedConfig: optimizer.params.lr must be a number, not {rate!r}")
    if "learning_rate" in params:
        raise ConfigurationError("deepspeedConfig: optimizer.params has 'learning_rate': did you mean 'lr'?")
    if "max_grad_norm" in params:
        raise ConfigurationError(
            "deepspeedConfig: DeepSpeed refuses optimizer.params.max_grad_norm: use 'gradient_clipping' instead"
        )


def _offload(config: Config, name: str) -> str:
    """Return where the section ``name`` offloads to, unchecked; ``"none"`` if it does not."""
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return "none"
    if name == "offload_optimizer" and zero.get("cpu_offload") is True:  # an older form, for the CPU only
        return "cpu"
    section = zero.get(name)
    return "none" if section is None else str(_section(zero, name).get("device", "none"))


def _check_offload(config: Config, stage: int) -> None:
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = _offload(config, name)
        where = f"deepspeedConfig: zero_optimization.{name}"
        if device not in ("none", "cpu", "nvme"):
            raise ConfigurationError(f"{where}.device must be 'none', 'cpu' or 'nvme', not {device!r}")
        if device == "none":
            continue
        needed = 3 if device == "nvme" else least
        if stage < needed:
            raise ConfigurationError(
                f"{where} with device {device!r} needs ZeRO stage {needed}{' or more' if needed < 3 else ''}, not "
                f"{stage}"
            )
        section = config["zero_optimization"].get(name) or {}
        path = section.get("nvme_path")
        if device == "nvme" and (not isinstance(path, str) or not path):
            raise ConfigurationError(
                f"{where} with device 'nvme' needs an nvme_path, a folder on a fast disk of each node, not {path!r}"
            )
        ratio = section.get("ratio", 1.0)
        if isinstance(ratio, (int, float)) and ratio < 1.0 and stage < 3:
            raise ConfigurationError(
                f"{where}.ratio is {ratio}: a ratio below 1 (only a part is offloaded) needs ZeRO stage 3, not {stage}"
            )


def _data_parallel_size(config: Config, world_size: int) -> tuple[int, str]:
    """Return the number of ranks that see different samples, and its calculation as text for errors."""
    stages = _section(config, "pipeline").get("stages", AUTO)
    parts = {
        "pipeline.stages": 1 if stages == AUTO else stages,
        "tensor_parallel.autotp_size": _section(config, "tensor_parallel").get("autotp_size") or 1,
        "sequence_parallel_size": config.get("sequence_parallel_size", 1),
    }
    size, words = world_size, f"{world_size} ranks"
    for name, count in parts.items():
        check_count(f"deepspeedConfig: {name}", count)
        if size % count:
            raise ConfigurationError(f"deepspeedConfig: {name} is {count}, which does not divide {words}")
        if count > 1:
            size, words = size // count, f"{words} / {count} ({name})"
    return size, words


def _batches(config: Config) -> tuple[Any, Any, Any]:
    sizes = (config.get(TRAIN), config.get(MICRO), config.get(ACCUMULATION))
    for name, size in zip((TRAIN, MICRO, ACCUMULATION), sizes):
        if size not in (None, AUTO):
            check_count(f"deepspeedConfig: {name}", size)
    return sizes


def _check_batches(config: Config, world_size: int) -> None:
    ranks, words = _data_parallel_size(config, world_size)
    train, micro, accumulation = (size if isinstance(size, int) else None for size in _batches(config))
    if train is None:
        return
    product = (micro or 1) * (accumulation or 1) * ranks
    fits = train == product if micro and accumulation else train % product == 0
    if not fits:
        factors = " x ".join(
            f"{size} ({name})" for name, size in ((MICRO, micro), (ACCUMULATION, accumulation)) if size is not None
        )
        given = f"{factors} x {words}" if factors else words
        split = '. If the model is split over ranks, the configuration must say so, as in "pipeline": {"stages": 2}'
        hint = split if ranks == world_size else ""
        verb = "is not" if micro and accumulation else "is not a multiple of"
        raise ConfigurationError(f"deepspeedConfig: {TRAIN} {train} {verb} {given} = {product}{hint}")


def _fill_batches(final: Config, world_size: int, auto: Mapping[str, Any], guess: bool) -> None:
    """Fill in batch sizes that are "auto": from ``auto=``, each other, or Hugging Face's defaults."""
    ranks, words = _data_parallel_size(final, world_size)
    for path, name in ((MICRO, "micro_batch_size"), (ACCUMULATION, "gradient_accumulation_steps")):
        if name in auto:
            _fill(final, path, check_count(f"auto: {name}", auto[name]), True, name)
    train, micro, accumulation = _batches(final)
    if not guess:
        return
    # DeepSpeed computes a size that is left out from the others: they follow from its value in auto=.
    micro, accumulation = micro or auto.get("micro_batch_size"), accumulation or auto.get(ACCUMULATION)
    if micro == AUTO:
        steps = accumulation if isinstance(accumulation, int) else 1
        micro = final[MICRO] = (
            _divide(train, steps * ranks, f"{steps} ({ACCUMULATION}) x {words}")
            if isinstance(train, int)
            else FILL["micro_batch_size"]
        )
    if accumulation == AUTO:
        accumulation = final[ACCUMULATION] = (
            _divide(train, micro * ranks, f"{micro} ({MICRO}) x {words}")
            if isinstance(train, int) and isinstance(micro, int)
            else FILL["gradient_accumulation_steps"]
        )
    if train == AUTO:
        final[TRAIN] = (micro or FILL["micro_batch_size"]) * (accumulation or 1) * ranks


def _divide(train: int, by: int, words: str) -> int:
    if train % by:
        raise ConfigurationError(f"deepspeedConfig: {TRAIN} {train} is not a multiple of {words} = {by}")
    return train // by


def _fill(config: Config, path: str, value: Any, explicit: bool, name: str) -> None:
    """Replace a setting that is "auto". A value that the user has ``said`` in ``auto=`` must not contradict another."""
    *sections, last = path.split(".")
    for section in sections:
        inner = config.get(section)
        if not isinstance(inner, dict):
            return
        config = inner
    present = config.get(last)
    if present == AUTO:
        config[last] = plain(value, f"auto.{name}")
    elif explicit and present is not None and present != plain(value, f"auto.{name}"):
        raise ConfigurationError(f"deepspeedConfig: {path} is {present!r}, which contradicts auto={{{name!r}: ...}}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value
