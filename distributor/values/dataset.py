"""Where a rank finds the data of a run. Environment variables pass it to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distributor.values import codec

#: A snapshot's manifest in its folder. A folder without it is no snapshot.
MANIFEST = "snapshot.json"

#: All data of a run, as JSON.
DATASETS = "DISTRIBUTOR_DATASETS"


@dataclass(frozen=True)
class Dataset:
    """A snapshot of a table, as ranks read it."""

    folder: str  # an absolute path that all nodes see, or a URL
    lanes: int
    snapshot: str = ""  # its manifest's id; empty if any will do


@dataclass(frozen=True)
class Datasets:
    """The data of a run, by name."""

    by_name: Mapping[str, Dataset] = field(default_factory=dict)


def to_environ(datasets: Mapping[str, Dataset]) -> dict[str, str]:
    """Return the variables that tell ranks where data are."""
    return {DATASETS: codec.pack(Datasets(datasets)).decode()} if datasets else {}


def from_environ(environ: Mapping[str, str]) -> Mapping[str, Dataset]:
    """Read where data are, by their names, from environment variables."""
    return codec.read(Datasets, environ[DATASETS]).by_name if DATASETS in environ else {}
