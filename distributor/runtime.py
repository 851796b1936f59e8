"""What a training function may ask for inside a rank.

Example:
    >>> from distributor import runtime
    >>> engine, *_ = deepspeed.initialize(model=model, config=runtime.deepspeed_config())  # doctest: +SKIP
"""

from __future__ import annotations

import json
import os
from typing import Any

from distributor.errors import ConfigurationError
from distributor.launch.deepspeed import CONFIG_PATH


def deepspeed_config() -> dict[str, Any]:
    """The final configuration of this run, for ``deepspeed.initialize(config=...)``; a new copy with each call.

    Raises:
        ConfigurationError: this process is no rank of a run with a ``deepspeedConfig``, or there still is an "auto" in
            it that only Hugging Face's Trainer can fill.

    Example:
        >>> deepspeed_config()["zero_optimization"]["stage"]  # doctest: +SKIP
        3
    """
    path = os.environ.get(CONFIG_PATH)
    if path is None and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigurationError(
            "this run has no DeepSpeed configuration: pass DeepspeedTorchDistributor(deepspeedConfig=...)"
        )
    if path is None:
        raise ConfigurationError(
            "there is no DeepSpeed configuration here: it is there inside a rank of "
            "DeepspeedTorchDistributor(deepspeedConfig=...)"
        )
    from distributor.deepspeed.config import unfilled

    with open(path, encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    if left := unfilled(config):
        raise ConfigurationError(
            f"deepspeedConfig: {left[0]} is 'auto', but nobody can know it here: pass auto={{'total_steps': ...}}"
        )
    return config
