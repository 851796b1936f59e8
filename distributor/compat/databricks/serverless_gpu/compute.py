"""``serverless_gpu.compute``: types of GPUs."""

from distributor.compat.databricks.types import GPUType as GPUType

__all__ = ["GPUType"]
