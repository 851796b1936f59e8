"""``Ray``, the object that users pass as ``launch=`` to start a Ray cluster."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from distributor.errors import ConfigurationError
from distributor.launch.ray.path import RayNodes
from distributor.values.checks import check_memory

#: Minimum size of an object store in bytes. Source: ``ray/_private/ray_constants.py``.
_LEAST = 78_643_200


@dataclass(frozen=True)
class Ray:
    """The launch path that starts a Ray cluster on the run's nodes, and runs the function once, as Ray's driver.

    ``num_processes`` is the number of Ray workers that fit into the cluster. Each node offers Ray the CPUs and GPUs
    that the workers on this node need. The user's function runs on node 0. There, ``ray.init()`` joins the cluster. If
    the function does not call ``ray.init()``, Ray itself does so when Ray is first used. ``run()`` returns what the
    function returns. The cluster ends when the function ends. The cluster accepts only the processes of the run, which
    have the cluster's token.

    Args:
        object_store_memory: size of each node's object store, such as ``"2g"``, at least 78,643,200 bytes. ``None``
            (default): Ray's own default, at most 30 % of the memory that is available when Ray starts.

    Example:
        >>> from distributor import Distributor
        >>> def train():
        ...     from ray.train import ScalingConfig
        ...     from ray.train.torch import TorchTrainer
        ...     return TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=8)).fit().metrics
        >>> Distributor(8, launch=Ray(object_store_memory="2g")).run(train)  # doctest: +SKIP
    """

    object_store_memory: int | str | None = None

    def resolve(self, num_processes: int, use_gpu: bool) -> RayNodes:
        """Check ``object_store_memory``, and return the launch path that becomes part of the job.

        Raises:
            ConfigurationError: the size of the object store is invalid.
        """
        size = self.object_store_memory
        if size is not None:
            size = check_memory("object_store_memory", size)
            if size < _LEAST:
                raise ConfigurationError(
                    f"object_store_memory must be at least {_LEAST:,} bytes (Ray's minimum), not "
                    f"{self.object_store_memory!r}"
                )
        return RayNodes(secrets.token_hex(16), size)
