"""Read, commit and remove the checkpoints of one place."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from distributor.checkpoint import records
from distributor.checkpoint.records import INDEX, MANIFEST, Index, Manifest, Shard
from distributor.machine.storage import Storage
from distributor.values import sealed
from distributor.values.checkpoints import Checkpoints
from distributor.values.sealed import DamagedError

#: Seconds without a change after which the run of an uncommitted checkpoint counts as ended.
_ABANDONED = 3600.0


@dataclass(frozen=True)
class Draft:
    """A checkpoint with all its shards, ready to be committed."""

    folder: str
    step: int
    world_size: int
    origin: str
    shards: tuple[Shard, ...]
    metrics: Mapping[str, float]


class Catalog:
    """The checkpoints of one place. Only one process at a time may commit there: rank 0 of a run.

    Args:
        only: the folder of the only checkpoint that is read (default: all are).
    """

    def __init__(
        self, storage: Storage, checkpoints: Checkpoints, *, sole: bool = False, only: str | None = None
    ) -> None:
        self._storage = storage
        self._checkpoints = checkpoints
        self._sole = sole  # only this run can commit here: remove others' uncommitted checkpoints, however new
        self._only = only
        self._known: list[Manifest] | None = None  # committed, the newest first; None until they are read
        self._unread: dict[str, OSError] = {}  # why a folder's manifest, or an index, cannot be read
        self._passed: dict[str, OSError] = {}  # why checkpoints with a manifest could not be loaded
        self._spare = INDEX[0]  # the file to which the next index is written
        self._number = 0  # number of the last commit that was tried

    def committed(self) -> list[Manifest]:
        """Read the manifests of all committed checkpoints, the newest first. Their shards are not checked."""
        listed = self._storage.folders() if self._only is None else [self._only]
        self._unread = {}
        indexes = self._read_indexes() if self._only is None else []
        named = indexes[0].folders if indexes else ()
        found: list[Manifest] = []
        for folder in dict.fromkeys([*(name for each in indexes for name in each.folders), *listed]):
            if records.origin_of(folder) is None:
                continue
            try:
                manifest = self.read(folder)
            except OSError as error:
                self._unread[folder] = error
                continue
            if manifest is not None:
                found.append(manifest)
            elif folder in named and not found:  # it was committed, and the newer ones are gone too
                self._unread[folder] = DamagedError(f"{MANIFEST} is missing")
        self._known = sorted(found, key=lambda each: each.number, reverse=True)
        # A checkpoint that cannot be read now has a number, too, and the next one must get a larger number.
        newest = max([*(each.sequence for each in indexes), *(each.number for each in found)], default=0)
        self._number = max(self._number, newest + len(self._unread))
        return list(self._known)

    def has_any(self) -> bool:
        """Return whether there are committed checkpoints, also such as cannot be read."""
        return bool(self.committed() or self._unread)

    def all_committed(self) -> list[Manifest]:
        """Like :meth:`committed`, but raise an ``OSError`` if something cannot be read that may be whole."""
        found = self.committed()
        if hidden := {name: error for name, error in self._unread.items() if self._is_hidden(name)}:
            raise OSError(f"what is in {self._checkpoints.dir!r} cannot be read: {records.described(hidden)}")
        return found

    def read(self, folder: str) -> Manifest | None:
        """Return the manifest of a folder's checkpoint; ``None`` if it has none, so is not committed."""
        data = self._fetch(f"{folder}/{MANIFEST}", MANIFEST)
        manifest = None if data is None else records.read_manifest(data)
        if manifest is not None and manifest.folder != folder:
            raise DamagedError(f"{MANIFEST} is that of {manifest.folder}")
        return manifest

    def is_committed(self, folder: str) -> bool:
        """Return whether a folder has a complete manifest; OSError if the manifest cannot be read."""
        try:
            return self.read(folder) is not None
        except DamagedError:
            return False

    def _fetch(self, path: str, name: str) -> bytes | None:
        try:
            return self._storage.read(path)
        except OSError as error:
            raise OSError(f"{name} cannot be read: {error}") from error

    def _read_indexes(self) -> list[Index]:
        """Read both files of the index, the newest first, except files that are missing or cannot be read."""
        found: dict[str, Index] = {}
        for name in INDEX:
            try:
                data = self._fetch(name, name)
                if data is not None:
                    found[name] = sealed.read(Index, data, name)
            except OSError as error:
                self._unread[name] = error
        newest = sorted(found, key=lambda name: found[name].sequence, reverse=True)
        self._spare = self._other(newest[0]) if newest else INDEX[0]
        return [found[name] for name in newest]

    def _other(self, name: str) -> str:
        """Return the file for the index after the one in ``name``: the same if the other cannot be read."""
        other = INDEX[1 - INDEX.index(name)]
        return name if self._is_hidden(other) else other

    def _is_hidden(self, name: str) -> bool:
        """Return whether a record cannot be read now, but may be whole."""
        return name in self._unread and not isinstance(self._unread[name], DamagedError)

    def problem(self, manifest: Manifest) -> OSError | None:
        """Return why a checkpoint lacks a file, or which file has another size; ``None`` if it has all files."""
        for shard in manifest.shards:
            try:
                size = self._storage.size(f"{manifest.folder}/{shard.name}")
            except OSError as error:
                return OSError(f"{shard.name} cannot be read: {error}")
            if size != shard.size:
                is_there = f"has {size} bytes instead of {shard.size}"
                return DamagedError(f"{shard.name} {'is missing' if size is None else is_there}")
        return None

    def latest(self, passed: dict[str, OSError], *, states: bool = False) -> Manifest | None:
        """Return the newest committed checkpoint that has all its files; ``None`` if there is none.

        It skips those in ``passed``, and adds why others cannot be loaded. OSError if none can be, and some may be
        whole. With ``states``, files of ``checkpoint_folder`` count only if there is nothing else.
        """
        return self._first(self._ranked(states), passed)

    def best(self, passed: dict[str, OSError], *, states: bool = False) -> Manifest | None:
        """Like :meth:`latest`, but return the best by the metric in ``Checkpoints(best=...)``."""
        if self._checkpoints.best is None:
            return None
        return self._first(records.by_metric(self._ranked(states), self._checkpoints), passed)

    def _ranked(self, states: bool) -> list[Manifest]:
        found = self.committed()
        return [each for each in found if each.has_state or not states] or found

    def _first(self, ranked: Sequence[Manifest], passed: dict[str, OSError]) -> Manifest | None:
        passed |= self._unread
        found = None
        for each in ranked:
            if each.folder in passed:
                continue
            problem = self.problem(each)
            if problem is None:
                found = each
                break
            passed[each.folder] = problem
        self._passed |= passed
        if found is not None:
            self._passed.pop(found.folder, None)
        elif not all(isinstance(error, DamagedError) for error in passed.values()):  # some may be whole
            raise OSError(f"no checkpoint in {self._checkpoints.dir!r} can be loaded: {records.described(passed)}")
        return found

    def commit(self, draft: Draft) -> Manifest:
        """Commit a checkpoint. Then remove those that ``keep=`` and ``best=`` do not protect, and abandoned ones.

        After an OSError, the caller must call :meth:`discard`, because the checkpoint may have a manifest already.
        """
        known = self.committed() if self._known is None else self._known
        self._number += 1  # a commit that fails uses up its number
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
        self._storage.write(f"{draft.folder}/{MANIFEST}", sealed.seal(manifest))
        known = [manifest, *known]
        removed = records.surplus(known, self._checkpoints, self._passed)
        stay = [each for each in known if each not in removed]
        hidden = [name for name in self._unread if name not in INDEX and self._is_hidden(name)]
        self._write_index([*(each.folder for each in stay), *hidden])
        self._known = stay
        self._remove([each.folder for each in removed])
        with suppress(OSError):  # a later commit removes what remains
            self._remove(self._abandoned(draft.origin))
        return manifest

    def _write_index(self, folders: Sequence[str]) -> None:
        self._storage.write(self._spare, sealed.seal(Index(self._number, tuple(folders))))
        self._spare = self._other(self._spare)

    def _remove(self, folders: Sequence[str]) -> None:
        """Remove checkpoints, each manifest first, so that no manifest names a missing file."""
        for folder in folders:
            with suppress(OSError):  # a later commit removes what remains
                self._storage.remove(f"{folder}/{MANIFEST}")
                self._storage.remove_folder(folder)

    def _abandoned(self, origin: str) -> list[str]:
        """Return the folders of uncommitted checkpoints that no run will commit, as far as can be known."""
        assert self._known is not None
        known, before = {*(each.folder for each in self._known), *self._unread}, time.time() - _ABANDONED
        run = origin.rpartition("-")[0]
        earlier = [f"{run}-{attempt}" for attempt in range(int(origin.rpartition("-")[2]))]
        found = []
        for folder in self._storage.folders():
            maker = records.origin_of(folder)
            if maker is None or folder in known:
                continue
            is_over = maker in earlier or (self._sole and maker.rpartition("-")[0] != run)
            with suppress(OSError):  # what cannot be read may be committed
                is_over = is_over or (self._storage.changed(folder) or before) < before
                if is_over and self._storage.read(f"{folder}/{MANIFEST}") is None:
                    found.append(folder)
        return found

    def discard(self, folder: str) -> None:
        """Remove a checkpoint that could not be committed."""
        self._remove([folder])
