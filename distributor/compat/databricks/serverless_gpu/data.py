"""The names of ``serverless_gpu.data``, none of which works here, since they need Databricks' own services.

Using a name of Databricks' module, such as ``DataLoader``, raises an error that says what to use instead.
Source: the page "Connect to AI Runtime" of https://docs.databricks.com/aws/en/machine-learning/ai-runtime
"""

from __future__ import annotations

from typing import Any

from distributor.compat.databricks.air.data import INSTEAD, refusal


def __getattr__(name: str) -> Any:
    if name not in INSTEAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise refusal("serverless_gpu.data", name)
