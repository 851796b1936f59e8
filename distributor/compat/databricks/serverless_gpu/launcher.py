"""``serverless_gpu.launcher``, from which some notebooks import ``distributed``.

For example, the notebooks for serverless GPUs of https://github.com/databricks-industry-solutions/genesis-workbench
import ``distributed`` from this module.
"""

from distributor.compat.databricks.serverless_gpu.launching import distributed as distributed

__all__ = ["distributed"]
