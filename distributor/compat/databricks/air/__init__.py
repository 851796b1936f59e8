"""The names of Databricks' package ``databricks.air``, which trains on one node; here, ranks train on several nodes.

    from distributor.compat.databricks.air import distributed  # instead of: from databricks.air import distributed

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
