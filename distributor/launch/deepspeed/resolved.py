"""DeepSpeed's configuration as nodes get it: read, checked and completed on the driver."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributor.launch.deepspeed import config as deepspeed_config
from distributor.launch.deepspeed.reading import Config
from distributor.text import notices


@dataclass(frozen=True)
class ResolvedConfig:
    """A final configuration, and what nodes have to know of it."""

    final: str  # JSON, for deepspeed.initialize
    given: str  # the same, with "auto" where Accelerate or Transformers may fill in a value from their own settings
    stage: int = 0  # of ZeRO
    precision: str = "fp32"  # or "fp16", "bf16"
    extensions: tuple[str, ...] = ()  # builders of the C++ and CUDA extensions that ranks load

    @classmethod
    def of(cls, config: Config, world_size: int, use_gpu: bool, auto: Mapping[str, Any]) -> ResolvedConfig:
        """Check and complete a configuration; ConfigurationError if it is wrong or does not fit ``world_size``."""
        deepspeed_config.check(config, world_size)
        if deepspeed_config.TRAIN not in config and deepspeed_config.MICRO not in config:
            notices.logger.warning(
                "deepspeedConfig has no batch size, which deepspeed.initialize requires: add %s or %s",
                deepspeed_config.TRAIN,
                deepspeed_config.MICRO,
            )
        final = deepspeed_config.fill(config, world_size, auto)
        deepspeed_config.check(final, world_size)
        return cls(
            json.dumps(final),
            json.dumps(deepspeed_config.fill(config, world_size, auto, guess=False)),
            deepspeed_config.zero_stage(final),
            deepspeed_config.precision(final),
            deepspeed_config.extensions(final, use_gpu),
        )
