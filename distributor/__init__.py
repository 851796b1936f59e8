"""Train deep networks on Apache Spark: ``TorchDistributor(num_processes=16, use_gpu=True).run(train, 1e-3)``.

The names below load on first use: importing the package imports neither pyspark nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributor.api import (
        DeepspeedTorchDistributor as DeepspeedTorchDistributor,
        TorchDistributor as TorchDistributor,
    )
    from distributor.autotuning import autotune as autotune
    from distributor.errors import (
        ConfigurationError as ConfigurationError,
        DistributorError as DistributorError,
        NodeLostError as NodeLostError,
        PayloadError as PayloadError,
        ResourceError as ResourceError,
        ResultError as ResultError,
        RunCancelledError as RunCancelledError,
        StallError as StallError,
        StartError as StartError,
        TrainingError as TrainingError,
    )
    from distributor.job import Status as Status
    from distributor.run import Run as Run
    from distributor.zero_stages import suggest_zero as suggest_zero, zero as zero

__version__ = "0.1.0"

_WHERE = {
    "TorchDistributor": "distributor.api",
    "DeepspeedTorchDistributor": "distributor.api",
    "autotune": "distributor.autotuning",
    "suggest_zero": "distributor.zero_stages",
    "zero": "distributor.zero_stages",
    "Run": "distributor.run",
    "Status": "distributor.job",
    **dict.fromkeys(
        (
            "ConfigurationError",
            "DistributorError",
            "NodeLostError",
            "PayloadError",
            "ResourceError",
            "ResultError",
            "RunCancelledError",
            "StallError",
            "StartError",
            "TrainingError",
        ),
        "distributor.errors",
    ),
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'distributor' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*(globals().keys() - {"Any", "TYPE_CHECKING", "annotations"}), *__all__})
