"""``serverless_gpu.launcher``: where some notebooks import ``distributed`` from.

Source: https://github.com/databricks-industry-solutions/genesis-workbench (notebooks for serverless GPUs).
"""

from distributor.compat.databricks.serverless_gpu.launching import distributed as distributed

__all__ = ["distributed"]
