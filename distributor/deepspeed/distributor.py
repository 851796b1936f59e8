"""``DeepspeedTorchDistributor``."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distributor.api.checks import check_count
from distributor.api.distributor import TorchDistributor
from distributor.deepspeed.launch import DeepSpeed
from distributor.errors import ConfigurationError


class DeepspeedTorchDistributor(TorchDistributor):
    """Trains with DeepSpeed on this machine or on Spark executors.

    A drop-in for PySpark's ``pyspark.ml.deepspeed.deepspeed_distributor``; what is added is keyword-only.

    Args:
        numGpus: ranks, each with a GPU of its own, of each node.
        nnodes: nodes; ``numGpus * nnodes`` ranks train together. Spark places them: ``max_processes_per_node=numGpus``
            keeps it from putting more on one executor.
        localMode: as ``local_mode`` of :class:`TorchDistributor`.
        useGpu: as ``use_gpu``. Without GPUs, DeepSpeed trains on CPUs, with gloo.
        deepspeedConfig: DeepSpeed's configuration, as a dict or the path of a JSON or YAML file on the driver;
            :func:`distributor.zero` makes one. ``"auto"`` values are filled. A function gets the final one from
            ``distributor.runtime.deepspeed_config()``; no file is left anywhere.
        auto: values for what is ``"auto"``: ``micro_batch_size``, ``gradient_accumulation_steps``, ``learning_rate``,
            ``betas``, ``eps``, ``weight_decay``, ``gradient_clipping``, ``warmup_steps``, ``total_steps``,
            ``precision`` (``"fp32"``, ``"fp16"``, ``"bf16"``) and ``hidden_size`` (of the model, for the buckets).
            Batch sizes follow from each other; what is left is filled with the defaults of Hugging Face's
            ``TrainingArguments``. Accelerate and Transformers get it unfilled, since they know more.
        script_arguments: scripts and modules get ``--deepspeed --deepspeed_config PATH`` after their own arguments
            (default), as with DeepSpeed's own launcher. ``False`` for those that do not know these options.
        extensions_timeout: seconds that ranks wait for the one of their node that compiles DeepSpeed's extensions on
            first use (default 600). They stay in ``~/.cache/distributor``, or in ``TORCH_EXTENSIONS_DIR``.
        options: everything else is as with :class:`TorchDistributor`.

    Raises:
        ConfigurationError: an argument or the configuration is wrong; the text says which, its value, and what to do.
        ResourceError: GPUs are wanted that are not there (with ``localMode`` given; else ``run`` says so).

    Example:
        >>> def train():
        ...     import deepspeed
        ...     from distributor import runtime
        ...     engine, *_ = deepspeed.initialize(model=make_model(), config=runtime.deepspeed_config())
        >>> DeepspeedTorchDistributor(numGpus=4, nnodes=2, deepspeedConfig=zero(3)).run(train)  # doctest: +SKIP
    """

    def __init__(
        self,
        numGpus: int = 1,  # noqa: N803  # PySpark's name, as are the next ones
        nnodes: int = 1,
        localMode: bool | None = None,  # noqa: N803
        useGpu: bool = True,  # noqa: N803
        deepspeedConfig: str | os.PathLike[str] | Mapping[str, Any] | None = None,  # noqa: N803
        *,
        auto: Mapping[str, Any] | None = None,
        script_arguments: bool = True,
        extensions_timeout: float = 600.0,
        **options: Any,
    ) -> None:
        for old, new in (("num_processes", "numGpus"), ("local_mode", "localMode"), ("use_gpu", "useGpu")):
            if old in options:
                raise ConfigurationError(f"{old} is called {new} here, as in PySpark's DeepspeedTorchDistributor")
        # PySpark takes True for one GPU, and its own tests pass that.
        world_size = check_count("numGpus", 1 if numGpus is True else numGpus) * check_count("nnodes", nnodes)
        self._shape = (numGpus, nnodes)
        self.deepspeed_config = deepspeedConfig
        self._deepspeed = DeepSpeed(deepspeedConfig, auto, script_arguments, extensions_timeout)
        super().__init__(world_size, localMode, useGpu, launch=self._deepspeed, **options)

    def __repr__(self) -> str:
        per_node, nodes = self._shape
        request = f"numGpus={per_node}, nnodes={nodes}, localMode={self.local_mode}, useGpu={self.use_gpu}"
        return f"{type(self).__name__}({request})"

    def with_config(
        self,
        deepspeedConfig: str | os.PathLike[str] | Mapping[str, Any] | None,  # noqa: N803
    ) -> DeepspeedTorchDistributor:
        """The same distributor, ``auto`` included, with another configuration. Raises what the constructor raises."""
        other = copy.copy(self)
        other.deepspeed_config = deepspeedConfig
        other._deepspeed = replace(self._deepspeed, config=deepspeedConfig)
        other._launch = other._deepspeed.resolve(self.num_processes, self.use_gpu)
        return other
