"""The names of Databricks' package ``serverless_gpu``. Here, ranks train on as many executors as they need.

    from distributor.compat.databricks.serverless_gpu import distributed  # instead of: from serverless_gpu import ...

Sources: https://api-docs.databricks.com/python/serverless_gpu/overview.html,
https://docs.databricks.com/aws/en/machine-learning/ai-runtime/distributed-training
"""

from distributor.compat.databricks.serverless_gpu import runtime as runtime
from distributor.compat.databricks.serverless_gpu.compute import GPUType as GPUType
from distributor.compat.databricks.serverless_gpu.launching import distributed as distributed
from distributor.compat.databricks.serverless_gpu.ray import ray_launch as ray_launch

__all__ = ["GPUType", "distributed", "ray_launch", "runtime"]
