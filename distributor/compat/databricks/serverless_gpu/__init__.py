"""The names of Databricks' package ``serverless_gpu``: ``distributed``, ``ray_launch``, ``runtime``, ``GPUType``.

    from distributor.compat.databricks.serverless_gpu import distributed   # instead of: from serverless_gpu import ...

    @distributed(gpus=8, gpu_type="H100")
    def train(learning_rate): ...

    values = train.distributed(1e-3)     # one value per rank

Ranks train on the executors of the active Spark session, on as many nodes as they need, or on this machine.
Sources: https://api-docs.databricks.com/python/serverless_gpu/overview.html,
https://docs.databricks.com/aws/en/machine-learning/ai-runtime/distributed-training
"""

from distributor.compat.databricks.serverless_gpu import runtime as runtime
from distributor.compat.databricks.serverless_gpu.compute import GPUType as GPUType
from distributor.compat.databricks.serverless_gpu.launching import distributed as distributed
from distributor.compat.databricks.serverless_gpu.ray import ray_launch as ray_launch

__all__ = ["GPUType", "distributed", "ray_launch", "runtime"]
