"""``DeepSpeed``, an object that users pass as ``launch=``. The driver reads, checks and completes the configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributor.errors import ConfigurationError
from distributor.launch.deepspeed import config as deepspeed_config, reading
from distributor.launch.deepspeed.path import DeepspeedRanks, ScriptArguments
from distributor.launch.deepspeed.reading import Config
from distributor.text import notices
from distributor.values.checks import check_seconds


@dataclass(frozen=True)
class DeepSpeed:
    """The launch path (way to start ranks) that trains with DeepSpeed.

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

    config: str | os.PathLike[str] | Mapping[str, Any] | None = None
    auto: Mapping[str, Any] | None = None
    script_arguments: ScriptArguments = "deepspeed"
    extensions_timeout: float = 600.0

    def resolve(self, num_processes: int, use_gpu: bool) -> DeepspeedRanks:
        """Check and complete the configuration, and return it with the other options as data for the nodes.

        Raises:
            ConfigurationError: the configuration or an option is wrong, or does not fit the number of ranks.
        """
        timeout = check_seconds("extensions_timeout", self.extensions_timeout, 1)
        kind = _check_arguments(self.script_arguments, self.config is not None)
        if self.config is None:
            if self.auto is not None:
                raise ConfigurationError(
                    f"auto={dict(self.auto)!r} fills in a deepspeedConfig, but there is none: pass one"
                )
            return DeepspeedRanks(extensions_timeout=timeout, script_arguments=kind)
        final, given = _configs(self.config, num_processes, self.auto or {})
        return DeepspeedRanks(
            json.dumps(final),
            json.dumps(given),
            deepspeed_config.zero_stage(final),
            deepspeed_config.precision(final),
            deepspeed_config.extensions(final, use_gpu),
            timeout,
            kind,
        )


def _check_arguments(kind: Any, has_config: bool) -> ScriptArguments:
    if kind is not False and kind not in ("deepspeed", "trainer"):
        raise ConfigurationError(f"script_arguments must be 'deepspeed', 'trainer' or False, not {kind!r}")
    if kind == "trainer" and not has_config:
        raise ConfigurationError(
            "script_arguments='trainer' passes a deepspeedConfig to the script, but there is none: pass one"
        )
    checked: ScriptArguments = kind
    return checked


def _configs(
    source: str | os.PathLike[str] | Mapping[str, Any], world_size: int, auto: Mapping[str, Any]
) -> tuple[Config, Config]:
    """Return the final configuration, and a version that keeps every "auto" that another library may fill in."""
    config = reading.read(source)
    deepspeed_config.check(config, world_size)
    if deepspeed_config.TRAIN not in config and deepspeed_config.MICRO not in config:
        notices.logger.warning(
            "deepspeedConfig has no batch size, which deepspeed.initialize requires: add %s or %s",
            deepspeed_config.TRAIN,
            deepspeed_config.MICRO,
        )
    final = deepspeed_config.fill(config, world_size, auto)
    deepspeed_config.check(final, world_size)
    return final, deepspeed_config.fill(config, world_size, auto, guess=False)
