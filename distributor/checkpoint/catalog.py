"""Read, commit and remove the checkpoints of one place, which is a folder or a URL."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from distributor.checkpoint import records
from distributor.checkpoint.records import INDEX, MANIFEST, Index, Manifest, Shard
from distributor.machine.places import Place
from distributor.values.checkpoints import Checkpoints

#: A checkpoint's folder without a manifest holds no committed checkpoint. If nothing in it has changed for this number
#: of seconds, the run that wrote it counts as ended, and the next commit removes the folder.
_ABANDONED = 3600.0


@dataclass(frozen=True)
class Draft:
    """A checkpoint with all its shards (files), ready to be committed. Each field means the same as in ``Manifest``."""

    folder: str
    step: int
    world_size: int
    origin: str
    shards: tuple[Shard, ...]
    metrics: Mapping[str, float]


class Catalog:
    """The checkpoints of one place (a folder or URL). Only one process at a time may commit there: rank 0 of a run.

    Args:
        place: the folder or URL that holds the checkpoints.
        checkpoints: the options that say which checkpoints are kept.
        sole: whether only this run can commit here, because it has claimed its ``name=`` (see ``values.claims``). If
            so, each commit removes all uncommitted checkpoints of other runs, however new they are.
    """

    def __init__(self, place: Place, checkpoints: Checkpoints, *, sole: bool = False) -> None:
        self._place = place
        self._checkpoints = checkpoints
        self._sole = sole
        self._known: list[Manifest] | None = None  # committed, the newest first; None until they are read
        self._sequence = 0
        self._number = 0  # number of the last commit that was tried

    def committed(self) -> list[Manifest]:
        """Read the manifests (records) of all committed checkpoints, the newest first. Other files are not checked."""
        index = self._read_index()
        listed = [name for name, _ in self._place.folders()]
        found = [manifest for folder in {*index.folders, *listed} if (manifest := self.read(folder)) is not None]
        self._sequence = max(self._sequence, index.sequence)
        self._known = sorted(found, key=lambda each: each.number, reverse=True)
        return list(self._known)

    def read(self, folder: str) -> Manifest | None:
        """Return the manifest (record) of a folder's checkpoint; ``None`` if the checkpoint is not committed."""
        data = self._place.read(f"{folder}/{MANIFEST}")
        manifest = None if data is None else records.read_manifest(data)
        return manifest if manifest is not None and manifest.folder == folder else None

    def _read_index(self) -> Index:
        found = [Index(0, ())]
        for name in INDEX:
            data = self._place.read(name)
            index = None if data is None else records.read_index(data)
            if index is not None:
                found.append(index)
        return max(found, key=lambda each: each.sequence)

    def is_whole(self, manifest: Manifest) -> bool:
        """Return whether all files of a checkpoint exist and have the sizes that its manifest (its record) states."""
        return all(self._place.size(f"{manifest.folder}/{shard.name}") == shard.size for shard in manifest.shards)

    def latest(self) -> Manifest | None:
        """Return the newest committed checkpoint that has all its files; ``None`` if there is none."""
        return next((each for each in self.committed() if self.is_whole(each)), None)

    def best(self) -> Manifest | None:
        """Return the committed checkpoint with the best value of the metric in ``Checkpoints(best=...)``.

        Return ``None`` if ``best=`` names no metric, or if no complete checkpoint (one with all its files) has a value
        of this metric.
        """
        whole = [each for each in self.committed() if self.is_whole(each)]
        return records.best(whole, self._checkpoints)

    def commit(self, draft: Draft) -> Manifest:
        """Commit a checkpoint. Then remove checkpoints that ``keep=`` and ``best=`` do not protect, and abandoned ones.

        Raises:
            OSError: a manifest or the index could not be read or written. Earlier checkpoints are unchanged. The new
                checkpoint may have a manifest already, so the caller must call :meth:`discard`.
        """
        known = self.committed() if self._known is None else self._known
        self._number = 1 + max([self._number, *(each.number for each in known)])  # not the number of a failed commit
        manifest = Manifest(
            folder=draft.folder,
            number=self._number,
            step=draft.step,
            time=time.time(),
            world_size=draft.world_size,
            origin=draft.origin,
            shards=draft.shards,
            metrics=dict(draft.metrics),
        )
        self._place.write(f"{draft.folder}/{MANIFEST}", records.pack(manifest))
        known = [manifest, *known]
        removed = records.surplus(known, self._checkpoints)
        stay = [each for each in known if each not in removed]
        self._write_index(stay)
        self._known = stay
        with suppress(OSError):  # a later commit removes what remains
            self._remove([each.folder for each in removed])
            self._remove(self._abandoned(draft.origin))
        return manifest

    def _write_index(self, stay: Sequence[Manifest]) -> None:
        index = Index(self._sequence + 1, tuple(each.folder for each in stay))
        self._place.write(INDEX[index.sequence % 2], records.pack(index))
        self._sequence = index.sequence

    def _remove(self, folders: Sequence[str]) -> None:
        """Remove checkpoints. Each manifest (record) is removed first, so that no manifest names a missing file."""
        for folder in folders:
            self._place.remove_file(f"{folder}/{MANIFEST}")
            self._place.remove_folder(folder)

    def _abandoned(self, origin: str) -> list[str]:
        """Return the folders of uncommitted checkpoints that no run will commit, as far as can be known."""
        assert self._known is not None
        known, before = {each.folder for each in self._known}, time.time() - _ABANDONED
        run = origin.rpartition("-")[0]
        earlier = [f"{run}-{attempt}" for attempt in range(int(origin.rpartition("-")[2]))]
        found = []
        for folder, changed in self._place.folders():
            maker = records.origin_of(folder)
            if maker is None or folder in known:
                continue
            of_another = self._sole and maker.rpartition("-")[0] != run
            is_over = of_another or maker in earlier or (changed is not None and changed < before)
            if is_over and self._place.read(f"{folder}/{MANIFEST}") is None:
                found.append(folder)
        return found

    def discard(self, folder: str) -> None:
        """Remove a checkpoint that could not be committed."""
        with suppress(OSError):
            self._remove([folder])
