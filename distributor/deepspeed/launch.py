"""``DeepSpeed``, the launch path as users ask for it: read, checked and filled on the driver."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributor.api.checks import check_seconds
from distributor.deepspeed import config as deepspeed_config
from distributor.errors import ConfigurationError
from distributor.launch.deepspeed import DeepspeedRanks
from distributor.text import notices


@dataclass(frozen=True)
class DeepSpeed:
    """Train with DeepSpeed.

    Args:
        config: DeepSpeed's configuration, as a dict or the path of a JSON or YAML file on the driver;
            :func:`distributor.zero` makes one. ``"auto"`` values are filled. A function gets the final one from
            ``distributor.runtime.deepspeed_config()``; no file is left anywhere. ``None``: the training has its own.
        auto: values for what is ``"auto"``: ``micro_batch_size``, ``gradient_accumulation_steps``, ``learning_rate``,
            ``betas``, ``eps``, ``weight_decay``, ``gradient_clipping``, ``warmup_steps``, ``total_steps``,
            ``precision`` (``"fp32"``, ``"fp16"``, ``"bf16"``) and ``hidden_size`` (of the model, for the buckets).
            Batch sizes follow from each other; what is left is filled with the defaults of Hugging Face's
            ``TrainingArguments``. Accelerate and Transformers get it unfilled, since they know more.
        script_arguments: scripts and modules get ``--deepspeed --deepspeed_config PATH`` after their own arguments
            (default), as with DeepSpeed's own launcher. ``False`` for those that do not know these options.
        extensions_timeout: seconds that ranks wait for the one of their node that compiles DeepSpeed's extensions on
            first use (default 600). They stay in ``~/.cache/distributor``, or in ``TORCH_EXTENSIONS_DIR``.

    Example:
        >>> from distributor import Distributor, zero
        >>> Distributor(8, launch=DeepSpeed(zero(3))).run(train)  # doctest: +SKIP
    """

    config: str | os.PathLike[str] | Mapping[str, Any] | None = None
    auto: Mapping[str, Any] | None = None
    script_arguments: bool = True
    extensions_timeout: float = 600.0

    def resolve(self, num_processes: int, use_gpu: bool) -> DeepspeedRanks:
        """Return the launch path with the final configuration in it.

        Raises:
            ConfigurationError: the configuration or an option is wrong, or does not fit so many ranks.
        """
        timeout = check_seconds("extensions_timeout", self.extensions_timeout, 1)
        if self.config is None:
            if self.auto is not None:
                raise ConfigurationError(f"auto={dict(self.auto)!r} fills a deepspeedConfig, but there is none")
            return DeepspeedRanks(extensions_timeout=timeout, script_arguments=bool(self.script_arguments))
        final, given = _configs(self.config, num_processes, self.auto or {})
        return DeepspeedRanks(
            json.dumps(final),
            json.dumps(given),
            deepspeed_config.zero_stage(final),
            deepspeed_config.precision(final),
            deepspeed_config.extensions(final, use_gpu),
            timeout,
            bool(self.script_arguments),
        )


def _configs(
    source: str | os.PathLike[str] | Mapping[str, Any], world_size: int, auto: Mapping[str, Any]
) -> tuple[deepspeed_config.Config, deepspeed_config.Config]:
    """The final configuration, and the one with every "auto" that another library may fill."""
    config = deepspeed_config.read(source)
    deepspeed_config.check(config, world_size)
    if deepspeed_config.TRAIN not in config and deepspeed_config.MICRO not in config:
        notices.logger.warning(
            "deepspeedConfig gives no batch size: deepspeed.initialize refuses it unless %s or %s is added",
            deepspeed_config.TRAIN,
            deepspeed_config.MICRO,
        )
    final = deepspeed_config.fill(config, world_size, auto)
    deepspeed_config.check(final, world_size)
    return final, deepspeed_config.fill(config, world_size, auto, guess=False)
