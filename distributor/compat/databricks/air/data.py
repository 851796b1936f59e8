"""``databricks.air.data``: each of its names raises an error that says what to use instead."""

from typing import Any

from distributor.compat.refused import refusal


def __getattr__(name: str) -> Any:
    raise refusal("databricks.air.data", name)
