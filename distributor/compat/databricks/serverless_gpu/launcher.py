"""``serverless_gpu.launcher``, from which some notebooks import ``distributed``.

Source: https://github.com/databricks-industry-solutions/genesis-workbench (notebooks for serverless GPUs).
"""

from distributor.compat.databricks.serverless_gpu.launching import distributed as distributed

__all__ = ["distributed"]
