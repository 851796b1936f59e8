"""Find the last committed checkpoint, or a state in memory that is at least as new, and load it."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from distributor.checkpoint import pickles, recalling, shards, state as states
from distributor.checkpoint.generations import is_newer
from distributor.checkpoint.memory import Held, Memory, kept_by
from distributor.checkpoint.recalling import InMemory, Kept
from distributor.checkpoint.records import Manifest, Shard, pack, read_manifest
from distributor.checkpoint.saving import METADATA
from distributor.checkpoint.session import Session, current, in_run
from distributor.checkpoint.state import State
from distributor.errors import ConfigurationError
from distributor.machine.folders import locked
from distributor.text import notices

_log = notices.logger


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        step: the step of the training.
        path: the folder that holds its files, on this machine.
        metrics: the last value of each metric that rank 0 reported before the save, by the metric's name. A metric
            whose last value is not finite is missing.
    """

    step: int
    path: Path
    metrics: Mapping[str, float]

    def __fspath__(self) -> str:
        return str(self.path)


def latest_checkpoint() -> Checkpoint | None:
    """Return the last committed checkpoint; see :func:`distributor.runtime.latest_checkpoint`."""
    session = current("latest_checkpoint", together=in_run(os.environ))
    session.finish()
    folder = session.last or (_agreed(session) if in_run(os.environ) else _newest(session))
    if folder is None:
        return None
    manifest = session.catalog.read(folder)
    if manifest is None:
        raise OSError(
            f"checkpoint {folder!r} is no longer in {session.settings.checkpoints.dir!r}: do not remove checkpoints "
            "during a run"
        )
    return _here(session, manifest)


def _agreed(session: Session) -> str | None:
    """Return the checkpoint folder that all ranks use; ``None`` if there is no checkpoint.

    The first rank that calls this function looks for the newest checkpoint, and writes the name of its folder into the
    store that the ranks share. Ranks that call the function later take this folder. If several ranks look at the same
    time, all take the folder that is written first. So no rank waits for another.
    """
    agreed = session.exchange.agreed("latest")
    if agreed is None:
        agreed = session.exchange.agree("latest", _newest(session) or "-")
    return None if agreed == "-" else agreed


def _newest(session: Session) -> str | None:
    found = next(_candidates(session, []), None)
    return None if found is None else found.folder


def best_checkpoint() -> Checkpoint | None:
    """Return the best committed checkpoint; see :func:`distributor.runtime.best_checkpoint`."""
    session = current("best_checkpoint", together=False)
    session.finish()
    found = session.catalog.best()
    return None if found is None else _here(session, found)


def _candidates(session: Session, refused: Iterable[str]) -> Iterator[Manifest]:
    """Yield the committed checkpoints that have all their files, the newest first. Skip the folders in ``refused``."""
    for each in session.catalog.committed():
        if each.folder not in refused and session.catalog.is_whole(each):
            yield each


def _here(session: Session, manifest: Manifest) -> Checkpoint:
    """Return a committed checkpoint for the user. If it is kept at a URL, download its files to this machine."""
    path = _folder(session, manifest)
    if session.place.root is None:
        for shard in manifest.shards:
            _fetch(session, manifest, shard)
    return Checkpoint(manifest.step, path, dict(manifest.metrics))


def _folder(session: Session, manifest: Manifest) -> Path:
    root = session.place.root
    if root is not None:
        return root / manifest.folder
    return Path(session.settings.staging or session.staging) / "checkpoints" / manifest.folder


def _fetch(session: Session, manifest: Manifest, shard: Shard) -> Path:
    """Return the path of a shard (a file of a checkpoint) on this machine.

    If checkpoints are kept at a URL, the first rank of the node that needs the shard (file) downloads it. Outside a
    run, each process downloads the shard for itself.

    Raises:
        OSError: the file cannot be downloaded, or its bytes differ from the saved ones.
    """
    target = _folder(session, manifest) / shard.name
    if session.place.root is not None:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(os.fsencode(shard.name)).hexdigest()[:16]  # a path may be longer than a file's name may be
    beside = f"{manifest.folder}-{digest}"  # outside the folder, where any name may be a shard's
    with locked(_folder(session, manifest).with_name(f"{beside}.lock")):
        if not target.exists():
            part = _folder(session, manifest).with_name(f"{beside}.part")
            session.place.download(f"{manifest.folder}/{shard.name}", str(part))
            if not shards.is_intact(part, shard):
                raise OSError(f"{shard.name!r} of {manifest.folder!r} is not what was saved: its digest differs")
            os.replace(part, target)
    return target


def load_checkpoint(state: Any, *, weights_only: bool = True) -> int | None:
    """Load the last committed checkpoint; see :func:`distributor.runtime.load_checkpoint`."""
    if not isinstance(state, Mapping):
        raise ConfigurationError(
            "load_checkpoint: state must be a dict such as {'model': model, 'optimizer': optimizer}, not "
            f"{type(state).__name__}"
        )
    session = current("load_checkpoint")
    session.finish()
    memory, refused = kept_by(session), list[str]()
    while (manifest := _choose(session, memory, refused)) is not None:
        if isinstance(manifest, InMemory):
            assert memory is not None
            if (held := _recall(session, memory, manifest)) is not None:
                states.restore(state, _from_memory(held, state, weights_only=weights_only))
                return manifest.step
            memory = None  # it cannot be read: a committed checkpoint is loaded instead
            continue
        loading = _Loading(session, manifest)
        if _all_intact(session, manifest, loading):
            states.restore(state, loading.read(state, weights_only=weights_only))
            return manifest.step
        refused.append(manifest.folder)
    return None


def _choose(session: Session, memory: Memory | None, refused: Iterable[str]) -> Manifest | InMemory | None:
    """Return what all ranks load (a committed checkpoint, or a state in memory); ``None`` if there is neither.

    Rank 0 chooses what to load, and tells the other ranks.
    """
    key, what = session.next_key(), "load_checkpoint"
    told = session.exchange.gather(f"{key}/1", recalling.tell(memory), what)
    answers = [b""]
    if session.exchange.rank == 0:
        kept = recalling.agree(told)
        found = _committed(session, refused, kept)
        if kept is not None and is_newer(kept.checkpoint, None if found is None else found.folder):
            answers = kept.answers
        elif found is not None:
            answers = [pack(found)]
    chosen = session.exchange.share(f"{key}/1", answers, what)
    return recalling.read_answer(chosen) or read_manifest(chosen)


def _recall(session: Session, memory: Memory, chosen: InMemory) -> Held | None:
    """Read this rank's state from memory, and return the state; ``None`` if any rank cannot read its own state."""
    held, problem = None, b""
    try:
        held = memory.read(chosen.checkpoint, chosen.sources, chosen.seats)
    except OSError as error:
        problem = str(error).encode()
    return None if _any_problem(session, problem, f"the state of step {chosen.step} in memory cannot be read") else held


def _committed(session: Session, refused: Iterable[str], kept: Kept | None) -> Manifest | None:
    """Return the last committed checkpoint that is not in ``refused``; ``None`` if there is none.

    If the folder or URL of checkpoints cannot be read, but all ranks have a state in memory, log a warning and return
    ``None``.

    Raises:
        OSError: the folder or URL cannot be read, and not all ranks have a state in memory.
    """
    try:
        return next(_candidates(session, refused), None)
    except OSError as error:
        if kept is None:
            raise
        _log.warning(
            "load_checkpoint loads the state that is kept in memory, since the folder or URL of checkpoints= cannot "
            "be read: %s",
            error,
        )
        return None


def _from_memory(held: Held, entries: Mapping[str, Any], *, weights_only: bool) -> State:
    """Return the state to restore, converted from the state that was read from memory.

    For a module, the saved values are copied into the tensors that the module already has.
    """
    objects = states.load_objects(io.BytesIO(held.objects), weights_only=weights_only)
    tensors = states.wanted(entries, held.sizes)
    for name, tensor in tensors.items():
        part, kept = states.local_part(tensor), held.tensors[name]
        if part.shape != kept.shape:
            raise ConfigurationError(
                f"load_checkpoint: this rank's part of {name!r} had the size {tuple(kept.shape)} when it was saved, "
                f"and has the size {tuple(part.shape)} now: split the model over the ranks as before"
            )
        part.copy_(kept)
    return State(tensors, objects)


def _all_intact(session: Session, manifest: Manifest, loading: _Loading) -> bool:
    """Return whether all files of a checkpoint have the saved bytes. Each rank checks some of them."""
    exchange = session.exchange
    bad = loading.damaged(list(manifest.shards)[exchange.rank :: exchange.world_size])
    own = bad.encode(errors="backslashreplace")  # a file's name may be none in UTF-8
    return not _any_problem(session, own, f"checkpoint {manifest.folder} is damaged or cannot be read")


def _any_problem(session: Session, own: bytes, what: str) -> bool:
    """Return whether any rank cannot read its part of a checkpoint. If so, rank 0 logs a warning."""
    key, call, exchange = session.next_key(), "load_checkpoint", session.exchange
    told = exchange.gather(f"{key}/1", own, call, patient=True)  # reading may take a long time
    answer = exchange.share(f"{key}/1", [next((each for each in told if each), b"")], call, patient=True)
    if answer and exchange.rank == 0:
        _log.warning("%s (%s): another one is tried, if there is one", what, answer.decode())
    return bool(answer)


class _Loading:
    """Loads one checkpoint.

    Args:
        session: what this process uses to load checkpoints: their folder or URL, and access to the other ranks.
        manifest: the record of the checkpoint, which lists its files.
    """

    def __init__(self, session: Session, manifest: Manifest) -> None:
        self._session = session
        self._manifest = manifest
        self._shards = {shard.name: shard for shard in manifest.shards}

    def damaged(self, some: Iterable[Shard]) -> str:
        """Return the name of the first shard (file) that is damaged or unreadable, and why; ``""`` if there is none."""
        for shard in some:
            try:
                path = _fetch(self._session, self._manifest, shard)
            except Exception as error:  # any error: the other ranks wait for this result
                return f"{shard.name}: {error}"
            if self._session.place.root is not None and not shards.is_intact(path, shard):
                return f"{shard.name}: its digest differs"
        return ""

    def read(self, entries: Mapping[str, Any], *, weights_only: bool) -> State:
        """Read this rank's state from the checkpoint. A module's values are read into the module's existing tensors.

        Raises:
            ConfigurationError: the checkpoint was written by ``checkpoint_folder`` or saved from another model, has
                objects that ``weights_only`` refuses, or is to be loaded into a FullyShardedDataParallel.
            OSError: a file cannot be read or downloaded.
        """
        if not {METADATA, states.objects_file(0)} <= self._shards.keys():
            raise ConfigurationError(
                f"load_checkpoint: the checkpoint of step {self._manifest.step} was written by checkpoint_folder: find "
                "its files with latest_checkpoint()"
            )
        objects = states.load_objects(self._objects_path(), weights_only=weights_only)
        if not self._has_own_objects:
            objects = {name: value for name, value in objects.items() if not name.startswith("#")}
        metadata = self._metadata()
        tensors = states.wanted(entries, metadata.state_dict_metadata)
        self._read_tensors(metadata, tensors)
        return State(tensors, objects)

    @property
    def _has_own_objects(self) -> bool:
        return states.objects_file(self._session.exchange.rank) in self._shards

    def _objects_path(self) -> Path:
        """Return the path of the file with this rank's objects (its state apart from tensors).

        If the checkpoint has no file of objects for this rank, because fewer ranks saved it, return the path of rank
        0's file.
        """
        name = states.objects_file(self._session.exchange.rank if self._has_own_objects else 0)
        return _fetch(self._session, self._manifest, self._shards[name])

    def _metadata(self) -> Any:
        path = _fetch(self._session, self._manifest, self._shards[METADATA])
        try:
            return pickles.loads(path.read_bytes())
        except pickle.UnpicklingError as error:
            raise ConfigurationError(f"load_checkpoint: {path} cannot be trusted: {error}") from None

    def _read_tensors(self, metadata: Any, tensors: dict[str, Any]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, metadata, is_coordinator=False)
        plan = planner.finish_plan(planner.create_local_plan())
        for name in sorted({metadata.storage_data[item.storage_index].relative_path for item in plan.items}):
            _fetch(self._session, self._manifest, self._shards[name])
        reader = FileSystemReader(_folder(self._session, self._manifest))
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(plan, planner).wait()
