"""The records of checkpoints: a manifest of each checkpoint, and an index of all checkpoints. Pure functions of bytes.

A checkpoint is a folder of files, which are called shards. Its manifest names each with its size and checksum, and is
written last: the checkpoint is committed once it exists.

The index names the folders of committed checkpoints, because the lists of folders that some storage systems return may
be out of date. Two files hold it. They are written in turn, so that one of them is always complete.

Each record ends with a digest of itself, by which a reader detects a record that was written only in part. Checkpoints
can therefore be kept in a storage system without atomic renames or atomic overwriting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from distributor.values import sealed
from distributor.values.checkpoints import Checkpoints
from distributor.values.codec import Between
from distributor.values.files import RelativePath
from distributor.values.sealed import DamagedError

MANIFEST = "manifest.json"
INDEX = ("index-0.json", "index-1.json")
METADATA = ".metadata"  # the file in which DCP describes a state

_DESCRIBED = 8  # checkpoints in a message, at most

_FOLDER = re.compile(r"step-(?P<step>\d+)-(?P<origin>(?P<run>[0-9a-f]+)-(?P<attempt>\d+))-(?P<count>\d+)")


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint."""

    name: RelativePath  # to the checkpoint's folder, with slashes
    size: int  # bytes
    checksum: Annotated[int, Between(0, (1 << 32) - 1)]  # see shards.checksum


@dataclass(frozen=True)
class Manifest:
    """The record of one committed checkpoint."""

    folder: str
    number: int  # place in the order of commits, from 1
    step: int
    time: float  # of the commit, in seconds since the epoch
    world_size: int
    origin: str  # the run and attempt that wrote it, such as ``3f2a-0``
    shards: tuple[Shard, ...]
    #: Rank 0's last value of each metric before the save, except values that are not finite.
    metrics: Mapping[str, int | float] = field(default_factory=dict)

    @property
    def has_state(self) -> bool:
        """Whether ``save_checkpoint`` wrote it, and not ``checkpoint_folder``."""
        return {METADATA, objects_file(0)} <= {shard.name for shard in self.shards}


@dataclass(frozen=True)
class Index:
    """The record of all folders of committed checkpoints."""

    sequence: int  # grows with each version
    folders: tuple[str, ...]


def read_manifest(data: bytes) -> Manifest:
    """Return a manifest from bytes; DamagedError if incomplete, OSError if a newer version wrote them."""
    return sealed.read(Manifest, data, MANIFEST)


def folder_name(step: int, origin: str, count: int) -> str:
    """Return the name of a new checkpoint's folder. No two attempts write to the same folder.

    >>> folder_name(100, "3f2a-0", 2)
    'step-100-3f2a-0-2'
    """
    return f"step-{step}-{origin}-{count}"


def objects_file(rank: int) -> str:
    """Return the name of the file with a rank's objects in a state."""
    return f"objects-{rank}.pt"


def origin_of(name: str) -> str | None:
    """Return the run and attempt that made a folder; ``None`` if it is not the folder of a checkpoint.

    >>> origin_of("step-100-3f2a-0-2"), origin_of("step-100")
    ('3f2a-0', None)
    """
    found = _FOLDER.fullmatch(name)
    return None if found is None else found["origin"]


def step_of(name: str) -> int:
    """Return the step of the training at which a checkpoint was saved, from its folder's name.

    >>> step_of("step-40-3f2a-1-7")
    40
    """
    found = _FOLDER.fullmatch(name)
    assert found is not None
    return int(found["step"])


def run_of(name: str) -> str:
    """Return the run that made a checkpoint's folder.

    >>> run_of("step-100-3f2a-0-2")
    '3f2a'
    """
    found = _FOLDER.fullmatch(name)
    assert found is not None
    return found["run"]


def order_of(name: str) -> tuple[int, int]:
    """Return a key that sorts the checkpoints of one run: the attempt, and the number of the save in the attempt.

    >>> order_of("step-100-3f2a-0-2")
    (0, 2)
    """
    found = _FOLDER.fullmatch(name)
    assert found is not None
    return int(found["attempt"]), int(found["count"])


def surplus(
    committed: Iterable[Manifest], checkpoints: Checkpoints, passed: Mapping[str, OSError] | None = None
) -> list[Manifest]:
    """Return the checkpoints to remove: all except the newest ones and the best one.

    States and what ``checkpoint_folder`` wrote are counted separately. Those in ``passed`` could not be loaded, and do
    not count among those that stay. If damaged, they are removed once they are older than these; others may be
    readable again later.
    """
    newest_first = sorted(committed, key=lambda each: each.number, reverse=True)
    kinds = ([each for each in newest_first if each.has_state is has_state] for has_state in (True, False))
    return [each for kind in kinds for each in _surplus(kind, checkpoints, passed or {})]


def _surplus(newest_first: list[Manifest], checkpoints: Checkpoints, passed: Mapping[str, OSError]) -> list[Manifest]:
    good = [each for each in newest_first if each.folder not in passed]
    if checkpoints.keep is None or len(good) <= checkpoints.keep:
        return []
    oldest, kept = good[checkpoints.keep - 1].number, by_metric(good, checkpoints)[:1]
    return [
        each
        for each in newest_first
        if each.number < oldest
        and each not in kept
        and (each.folder not in passed or isinstance(passed[each.folder], DamagedError))
    ]


def by_metric(committed: Sequence[Manifest], checkpoints: Checkpoints) -> list[Manifest]:
    """Return the checkpoints with a value of ``checkpoints.best``, the best first; of equals, the oldest."""
    if checkpoints.best is None:
        return []
    name, which = checkpoints.best
    found = [each for each in committed if not math.isnan(each.metrics.get(name, math.nan))]
    found.sort(key=lambda each: each.number)  # the oldest was evaluated, if later saves only repeat its value
    return sorted(found, key=lambda each: each.metrics[name], reverse=which == "max")


def described(passed: Mapping[str, OSError]) -> str:
    """Return in words why checkpoints cannot be loaded, by folder.

    >>> described({"step-2-3f-0-2": OSError("model.pt is missing")})
    'step-2-3f-0-2 (model.pt is missing)'
    """
    texts = [f"{name} ({error})" for name, error in passed.items()]
    return ", ".join(texts[:_DESCRIBED] + ([f"{len(texts) - _DESCRIBED} more"] if len(texts) > _DESCRIBED else []))
