"""Trains deep networks on Apache Spark or on this machine.

    from distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=4, use_gpu=False)
    weights = distributor.run(train, 1e-3)            # a function
    distributor.run("train.py", "--lr", "0.1")        # a script
    distributor.run_module("pkg.train", "--lr", "0.1")

Training runs on the executors of the active Spark session or, without a
session on a cluster, on this machine. In a shell: distributor run --help.

    Distributor            holds the options of a run, and starts runs
    TorchDistributor       the same class under PySpark's name
    DeepspeedTorchDistributor, zero, suggest_zero, autotune
                           training with DeepSpeed, and how to configure it
    Checkpoints            where a run keeps checkpoints, and how many
    Data, snapshot, predict, release  a DataFrame fed, kept, and scored
    Run, runs, Status      the handle of a submitted run, active and
                           earlier runs, and the states of a run
    sweep                  a search over many runs: uniform, log_uniform,
                           int_range are what it chooses from
    DistributorError       base class of all errors: ConfigurationError
                           (its subclasses: PayloadError, ResourceError),
                           StartError, CompanionError, TrainingError
                           (NodeLostError, StallError), GroupError,
                           PreemptionError, StopError, ResultError,
                           RunCancelledError
    runtime                functions for use inside a rank
    callbacks, launch      trackers, and the values of launch=
    deepspeed_checkpoint   DeepSpeed checkpoints for another number of ranks

Modules that are not listed here are internal, except those of
distributor.compat (names of other launchers). ``import distributor``
imports neither pyspark nor torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributor.api.autotune import autotune as autotune
    from distributor.api.deepspeed import DeepspeedTorchDistributor as DeepspeedTorchDistributor
    from distributor.api.distributor import Distributor as Distributor, TorchDistributor as TorchDistributor
    from distributor.data.snapshots import snapshot as snapshot
    from distributor.data.source import Data as Data
    from distributor.errors import (
        CompanionError as CompanionError,
        ConfigurationError as ConfigurationError,
        DistributorError as DistributorError,
        GroupError as GroupError,
        NodeLostError as NodeLostError,
        PayloadError as PayloadError,
        PreemptionError as PreemptionError,
        ResourceError as ResourceError,
        ResultError as ResultError,
        RunCancelledError as RunCancelledError,
        StallError as StallError,
        StartError as StartError,
        StopError as StopError,
        TrainingError as TrainingError,
    )
    from distributor.launch.deepspeed.zero import suggest_zero as suggest_zero, zero as zero
    from distributor.run.handle import Run as Run
    from distributor.scoring.predict import predict as predict, release as release
    from distributor.search.space import int_range as int_range, log_uniform as log_uniform, uniform as uniform
    from distributor.search.sweep import sweep as sweep
    from distributor.tracking.history import runs as runs
    from distributor.values.checkpoints import Checkpoints as Checkpoints
    from distributor.values.job import Status as Status

__version__ = "0.1.0"

_WHERE = {
    "Distributor": "distributor.api.distributor",
    "TorchDistributor": "distributor.api.distributor",
    "DeepspeedTorchDistributor": "distributor.api.deepspeed",
    "Data": "distributor.data.source",
    "snapshot": "distributor.data.snapshots",
    "autotune": "distributor.api.autotune",
    **dict.fromkeys(("predict", "release"), "distributor.scoring.predict"),
    "suggest_zero": "distributor.launch.deepspeed.zero",
    "zero": "distributor.launch.deepspeed.zero",
    "Checkpoints": "distributor.values.checkpoints",
    "Run": "distributor.run.handle",
    "runs": "distributor.tracking.history",
    "sweep": "distributor.search.sweep",
    **dict.fromkeys(("int_range", "log_uniform", "uniform"), "distributor.search.space"),
    "Status": "distributor.values.job",
    **dict.fromkeys(
        (
            "CompanionError",
            "ConfigurationError",
            "DistributorError",
            "GroupError",
            "NodeLostError",
            "PayloadError",
            "PreemptionError",
            "ResourceError",
            "ResultError",
            "RunCancelledError",
            "StallError",
            "StartError",
            "StopError",
            "TrainingError",
        ),
        "distributor.errors",
    ),
}

_MODULES = {
    "deepspeed_checkpoint": "distributor.launch.deepspeed.checkpoint",
    "callbacks": "distributor.callbacks",
    "launch": "distributor.launch",
    "runtime": "distributor.runtime",
}

__all__ = ["__version__", *_WHERE, *_MODULES]


def _unfit() -> str | None:
    """Return why this Python or platform cannot run the package; ``None`` if it can."""
    if sys.platform == "win32":
        return "distributor needs Linux, but this is Windows: use WSL 2, a container or a Linux machine"
    if sys.version_info[:2] < (3, 11):  # noqa: UP036  (pip refuses older versions, but a clone may run without pip)
        version = ".".join(str(part) for part in sys.version_info[:3])
        return f"distributor needs Python 3.11 or later, but this is {version}: start it with another Python"
    return None


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'distributor' has no attribute {name!r}")
    problem = _unfit()
    if problem is not None:
        raise ImportError(problem)
    from importlib import import_module

    if name in _MODULES:
        return import_module(_MODULES[name])
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    """Return the public names and the attributes that every module has (``__name__``, ...), but no internal modules."""
    return sorted({*(name for name in globals() if name[:2] == name[-2:] == "__"), *__all__})
