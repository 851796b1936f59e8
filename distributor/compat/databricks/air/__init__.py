"""The names of Databricks' package ``databricks.air``: ``distributed``, ``ray_launch``, ``ray_init``, ``data``.

    from distributor.compat.databricks.air import distributed     # instead of: from databricks.air import distributed

    @distributed(num_accelerators=8, accelerator_type="GPU_8xH100")
    def train(learning_rate): ...

    values = train.distributed(1e-3)     # one value per rank

Databricks trains on one node. Here, ranks train on as many executors as they need, or on this machine.
Sources: the public page of the package ``databricks-sdk-air``,
https://docs.databricks.com/aws/en/machine-learning/ai-runtime/connecting/distributed-training
"""

from distributor.compat.databricks.air import data as data
from distributor.compat.databricks.air.launching import (
    distributed as distributed,
    ray_init as ray_init,
    ray_launch as ray_launch,
)

__all__ = ["data", "distributed", "ray_init", "ray_launch"]
