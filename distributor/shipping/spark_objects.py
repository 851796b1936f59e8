"""Objects of PySpark that ranks cannot use: which they are, why, and what to do instead. Imports nothing of PySpark."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """Why a kind of object is not sent to ranks."""

    why: str  # after the object's name
    instead: str  # what the user can do, in whole sentences


DRIVER_ONLY = Refusal(
    "lives on the driver only",
    "Ranks read data from files or shared storage: write a DataFrame there (df.write.parquet), or pass small data "
    "(df.toPandas())",
)
_ACCUMULATOR = Refusal(
    "counts in Spark's own tasks only",
    "Return what ranks count (submit(...).results() has the values of all ranks), or report it with runtime.report",
)
_BROADCAST = Refusal("can be read in Spark's own tasks only", "Pass its value (b.value)")

#: The refused classes, by module and name. Most other objects of Spark hold an object of one of these classes.
_REFUSED = {
    ("pyspark", "Accumulator"): _ACCUMULATOR,
    ("pyspark", "Broadcast"): _BROADCAST,
    ("pyspark", "RDD"): DRIVER_ONLY,
    ("pyspark", "SparkContext"): DRIVER_ONLY,
    ("pyspark.sql", "DataFrame"): DRIVER_ONLY,
    ("pyspark.sql", "SparkSession"): DRIVER_ONLY,
    # In PySpark 3.5, the classes of Spark Connect are not derived from the classic ones.
    ("pyspark.sql.connect.dataframe", "DataFrame"): DRIVER_ONLY,
    ("pyspark.sql.connect.session", "SparkSession"): DRIVER_ONLY,
    ("pyspark.sql.connect.client", "SparkConnectClient"): DRIVER_ONLY,
    ("py4j.java_gateway", "JavaObject"): DRIVER_ONLY,
    ("py4j.java_gateway", "GatewayClient"): DRIVER_ONLY,
}


class SparkObjectError(TypeError):
    """An object that ranks cannot use was to be pickled."""

    def __init__(self, value: Any, refusal: Refusal) -> None:
        super().__init__(f"{type(value).__qualname__} {refusal.why}")
        self.value = value
        self.refusal = refusal


def refused() -> dict[type, Refusal]:
    """Return the refused classes that this process has imported."""
    classes = {}
    for (module, name), refusal in _REFUSED.items():
        kind = getattr(sys.modules.get(module), "__dict__", {}).get(name)
        if isinstance(kind, type):
            classes[kind] = refusal
    return classes
