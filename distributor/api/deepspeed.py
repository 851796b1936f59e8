"""``DeepspeedTorchDistributor``, PySpark's interface to DeepSpeed."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distributor.api.distributor import TorchDistributor
from distributor.api.parameters import suggests_names
from distributor.errors import ConfigurationError
from distributor.launch.deepspeed.path import DeepSpeed, ScriptArguments
from distributor.values.checks import check_count


class DeepspeedTorchDistributor(TorchDistributor):
    """A distributor that trains with DeepSpeed on this machine or on Spark executors.

    It replaces ``DeepspeedTorchDistributor`` of PySpark's ``pyspark.ml.deepspeed.deepspeed_distributor``; additional
    arguments are keyword-only.

    Args:
        numGpus: number of ranks per node, each with its own GPU.
        nnodes: number of nodes; ``numGpus * nnodes`` ranks train together. Spark decides how many of these ranks each
            executor gets. To have at most ``numGpus`` ranks on an executor, pass ``max_processes_per_node=numGpus``.
        localMode: same as ``local_mode`` of :class:`distributor.TorchDistributor`.
        useGpu: same as ``use_gpu`` of :class:`distributor.TorchDistributor`. Without GPUs, DeepSpeed trains on CPUs,
            with gloo.
        deepspeedConfig: ``config`` of :class:`distributor.launch.DeepSpeed`.
        auto, script_arguments, extensions_timeout: as of :class:`distributor.launch.DeepSpeed`.
        options: the other options of :class:`distributor.TorchDistributor`, except ``launch``.

    Raises:
        ConfigurationError: an argument or the configuration is wrong; the message shows the value and says what to do.
        ResourceError: there are not enough GPUs. If ``localMode`` is not given, ``run`` raises this error, and the
            constructor does not.

    Example:
        >>> def train():
        ...     import deepspeed
        ...     from distributor import runtime
        ...     engine, *_ = deepspeed.initialize(model=make_model(), config=runtime.deepspeed_config())
        >>> DeepspeedTorchDistributor(numGpus=4, nnodes=2, deepspeedConfig=zero(3)).run(train)  # doctest: +SKIP
    """

    @suggests_names
    def __init__(
        self,
        numGpus: int = 1,  # noqa: N803  # PySpark's name, as are the next ones
        nnodes: int = 1,
        localMode: bool | None = None,  # noqa: N803
        useGpu: bool = True,  # noqa: N803
        deepspeedConfig: str | os.PathLike[str] | Mapping[str, Any] | None = None,  # noqa: N803
        *,
        auto: Mapping[str, Any] | None = None,
        script_arguments: ScriptArguments = "deepspeed",
        extensions_timeout: float = 600.0,
        **options: Any,
    ) -> None:
        if "num_processes" in options:
            raise ConfigurationError(
                "num_processes is not an option here: pass numGpus (ranks on each node) and nnodes, as with PySpark's "
                "DeepspeedTorchDistributor"
            )
        for old, new in (("local_mode", "localMode"), ("use_gpu", "useGpu")):
            if old in options:
                raise ConfigurationError(f"{old} is called {new} here, as in PySpark's DeepspeedTorchDistributor")
        if "launch" in options:
            raise ConfigurationError(
                f"launch={options['launch']!r} does not fit DeepspeedTorchDistributor, which always launches with "
                "DeepSpeed: use Distributor"
            )
        # PySpark accepts True as one GPU, and its own tests pass True.
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
        """Return a copy of this distributor with another configuration.

        All other arguments stay the same, including ``auto=`` (the values for settings that are "auto" in the
        configuration).

        Raises:
            ConfigurationError: the configuration is wrong, or does not fit the number of ranks.
        """
        other = copy.copy(self)
        other.deepspeed_config = deepspeedConfig
        other._deepspeed = replace(self._deepspeed, config=deepspeedConfig)
        other._launch = other._deepspeed.resolve(self.num_processes, self.use_gpu)
        return other
