"""Compares the versions of Python, torch and other packages that ranks need, such as DeepSpeed, on all hosts.

``distributor`` and cloudpickle need no check: they are shipped with the Spark job.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributor.values.placement import NodeFacts


_DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm")}  # of which any has the module


def here(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, of torch and of those packages that are installed, without importing them."""
    versions = {"Python": platform.python_version()}
    for package in ("torch", *packages):
        for distribution in _DISTRIBUTIONS.get(package, (package,)):
            with suppress(metadata.PackageNotFoundError):
                if version := metadata.version(distribution):  # None for what a broken upgrade has left
                    versions[package] = version
    return versions


def conflict(driver: Mapping[str, str], facts: Sequence[NodeFacts]) -> str | None:
    """Describe a difference between versions that would break the run; return ``None`` if there is none.

    Functions are shipped as bytecode, which is specific to a minor version of Python. Ranks with different minor
    versions of torch hang or corrupt each other: the format of the data in collectives is private to a version. JAX,
    TensorFlow and Ray also need equal minor versions.
    """
    by_partition = sorted(facts, key=lambda fact: fact.partition)
    first = by_partition[0]
    for fact in by_partition:
        ours, theirs = driver.get("Python", ""), fact.versions.get("Python", "")
        if ours and theirs and _minor(ours) != _minor(theirs):
            return (
                f"Python is {theirs} on {fact.host} and {ours} on the driver: functions need the same minor version. "
                "Choose another Python before the session starts (PYSPARK_PYTHON, spark.pyspark.python)"
            )
        for package in sorted(first.versions.keys() - {"Python"}):
            ours, theirs = first.versions[package], fact.versions.get(package, "")
            if theirs and _minor(ours) != _minor(theirs):
                return (
                    f"{package} is {theirs} on {fact.host} and {ours} on {first.host}: ranks need the same version. "
                    "Install one version on all hosts, or ship one environment (--archives)"
                )
    return None


def differences(driver: Mapping[str, str], first: NodeFacts, node: NodeFacts) -> list[str]:
    """Return warnings if a node's torch version differs from the first task's or from the driver's.

    Such a difference may be harmless. Each warning completes the sentence "the node on HOST ...".
    """
    ours = node.versions.get("torch", "")
    warnings = []
    if ours and ours != first.versions.get("torch", ours):
        warnings.append(
            f"has torch {ours}, but {first.host} has {first.versions['torch']}: install one version on all hosts"
        )
    if ours and _minor(ours) != _minor(driver.get("torch", ours)):
        warnings.append(
            f"has torch {ours}, but the driver has {driver['torch']}: tensors and modules that are "
            "sent from one to the other may not load. Install one version on both"
        )
    return warnings


def _minor(version: str) -> list[str]:
    """Return the major and the minor number of a version.

    >>> _minor("2.13.0+cpu") == _minor("2.13.1")
    True
    """
    return version.split("+")[0].split(".")[:2]
