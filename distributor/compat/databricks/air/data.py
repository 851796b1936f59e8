"""The names of ``databricks.air.data``, none of which works here, since they need Databricks' own services.

Using a name of Databricks' module, such as ``DataLoader``, raises an error that says what to use instead.
Source: the public page of the package ``databricks-sdk-air``.
"""

from __future__ import annotations

from typing import Any

from distributor.errors import ConfigurationError

#: What to use instead of each name.
INSTEAD = {
    "UCVolumeDataset": "torch.utils.data.Dataset over the files of /Volumes/..., or of any folder that all ranks have",
    "DataLoader": "torch.utils.data.DataLoader with a DistributedSampler",
    "UCVolumeReader": "torch.distributed.checkpoint.FileSystemReader with a path that all ranks have",
    "UCVolumeWriter": "torch.distributed.checkpoint.FileSystemWriter with a path that all ranks have",
    "Checkpointable": "torch.distributed.checkpoint.stateful.Stateful",
}


def refusal(module: str, name: str) -> ConfigurationError:
    """Return the error for a Databricks name that does not work here. The error says what to use instead of the name.

    Example:
        >>> str(refusal("databricks.air.data", "Checkpointable"))[:40]
        'databricks.air.data.Checkpointable needs'
    """
    return ConfigurationError(
        f"{module}.{name} needs Databricks' services, which are not available here: use {INSTEAD[name]}"
    )


def __getattr__(name: str) -> Any:
    if name not in INSTEAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise refusal("databricks.air.data", name)
