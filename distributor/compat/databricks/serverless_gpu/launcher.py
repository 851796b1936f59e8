"""``serverless_gpu.launcher``: https://github.com/databricks-industry-solutions/genesis-workbench imports from it."""

from distributor.compat.databricks.serverless_gpu.launching import distributed as distributed

__all__ = ["distributed"]
