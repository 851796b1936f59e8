"""``serverless_gpu.compute``: GPU types."""

from distributor.compat.databricks.types import GPUType as GPUType

__all__ = ["GPUType"]
