"""The classes that describe the inputs and the machines of Azure's jobs.

Sources: https://learn.microsoft.com/python/api/azure-ai-ml/azure.ai.ml.input,
https://learn.microsoft.com/python/api/azure-ai-ml/azure.ai.ml.entities.resourceconfiguration
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributor.errors import ConfigurationError
from distributor.text import notices
from distributor.values.checks import check_count


class AssetTypes:
    """Kinds of inputs, for ``Input(type=...)``. They have no effect: each ``Input`` is a path."""

    CUSTOM_MODEL = "custom_model"
    MLFLOW_MODEL = "mlflow_model"
    MLTABLE = "mltable"
    TRITON_MODEL = "triton_model"
    URI_FILE = "uri_file"
    URI_FOLDER = "uri_folder"


@dataclass(kw_only=True)
class Input:
    """An input: a path on all nodes, which the job's command gets unchanged. ``mode`` has no effect.

    Example:
        >>> Input(type=AssetTypes.URI_FOLDER, path="/mnt/data").path
        '/mnt/data'
    """

    type: str = AssetTypes.URI_FOLDER
    path: str = ""
    mode: str | None = None


@dataclass(init=False)
class ResourceConfiguration:
    """The number of instances of a job; by default, the job's own. Other arguments have no effect, with a warning.

    Example:
        >>> ResourceConfiguration(instance_count=2).instance_count
        2
    """

    instance_count: int | None = None

    def __init__(self, *, instance_count: int | None = None, **others: Any) -> None:
        self.instance_count = instance_count
        not_used("ResourceConfiguration", others)


JobResourceConfiguration = ResourceConfiguration  # in Azure, a class of its own


def instances(resources: Any) -> int | None:
    """Return the number of instances in resources, which may be a dict, or an object such as Azure's; ``None`` if none.

    >>> instances({"instance_count": 2}), instances(ResourceConfiguration())
    (2, None)
    """
    if resources is None:
        return None
    known = isinstance(resources, Mapping) or hasattr(resources, "instance_count")
    if not known:
        raise ConfigurationError(f'resources must be a dict such as {{"instance_count": 2}}, not {resources!r}')
    number = resources.get("instance_count") if isinstance(resources, Mapping) else resources.instance_count
    return None if number is None else check_count("instance_count", number)


def not_used(where: str, others: Mapping[str, Any]) -> None:
    """Warn about arguments that are accepted without effect."""
    if others:
        names = sorted(others)
        verb = "is" if len(names) == 1 else "are"
        notices.logger.warning("%s: %s %s not used here", where, ", ".join(names), verb)
