"""Find the last committed checkpoint, or a state in memory that is at least as new, and load it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from distributor.checkpoint import pickles, places, shards, training_state as states
from distributor.checkpoint.catalog import Catalog
from distributor.checkpoint.context import Checkpoint, Session, current, has_place, in_run
from distributor.checkpoint.memory.memory import Held, Memory, kept_by
from distributor.checkpoint.memory.states import InMemory, MemoryOffer, choose, is_newer
from distributor.checkpoint.records import METADATA, Manifest, Shard, described, objects_file
from distributor.checkpoint.training_state import TrainingState
from distributor.errors import ConfigurationError
from distributor.machine.folders import locked
from distributor.machine.storage import open_storage
from distributor.metrics import rank as reports
from distributor.text.wording import who
from distributor.values import codec
from distributor.values.checkpoints import Checkpoints
from distributor.values.sealed import DamagedError

_WHAT = "load_checkpoint"

T = TypeVar("T")


def latest_checkpoint() -> Checkpoint | None:
    """Return the last committed checkpoint; see :func:`distributor.runtime.latest_checkpoint`."""
    session = current("latest_checkpoint", together=in_run(os.environ))
    session.finish()
    folder = session.last or (_agreed(session) if in_run(os.environ) else _newest(session))
    if folder is None:
        return None
    try:
        manifest = session.catalog.read(folder)
    except OSError as error:
        where = session.settings.checkpoints.dir
        raise OSError(f"checkpoint {folder!r} in {where!r} cannot be loaded: {error}") from error
    if manifest is None:
        raise OSError(
            f"checkpoint {folder!r} is no longer in {session.settings.checkpoints.dir!r}: do not remove checkpoints "
            "during a run"
        )
    return _here(session, manifest)


def _agreed(session: Session) -> str | None:
    """Return the checkpoint folder that all ranks use; ``None`` if there is no checkpoint.

    If several ranks look for the newest at the same time, all take what is written first. So no rank waits for another.
    """
    agreed = session.exchange.agreed("latest")
    if agreed is None:
        agreed = session.exchange.agree("latest", _newest(session) or "-")
    return None if agreed == "-" else agreed


def _newest(session: Session) -> str | None:
    found = _find(session, "latest_checkpoint", session.catalog.latest)
    return None if found is None else found.folder


def best_checkpoint() -> Checkpoint | None:
    """Return the best committed checkpoint; see :func:`distributor.runtime.best_checkpoint`."""
    session = current("best_checkpoint", together=False)
    session.finish()
    found = _find(session, "best_checkpoint", session.catalog.best)
    return None if found is None else _here(session, found)


def _find(session: Session, call: str, choose: Callable[[dict[str, OSError]], Manifest | None]) -> Manifest | None:
    """Return the first of the chosen checkpoints whose files are there, or can be downloaded to this machine."""
    passed: dict[str, OSError] = {}
    while (found := choose(passed)) is not None:
        try:
            _here(session, found)
            break
        except OSError as error:
            passed[found.folder] = error
    _tell_passed(call, passed, "finds no checkpoint" if found is None else f"returns {found.folder}")
    return found


def _tell_passed(call: str, passed: Mapping[str, OSError], what: str) -> None:
    """Warn of checkpoints that could not be loaded. ``what`` says what the call does instead."""
    if passed:
        reports.warn(f"{call} {what} and passes over {described(passed)}")


def _here(session: Session, manifest: Manifest) -> Checkpoint:
    """Return a checkpoint for the user. If it is kept at a URL, download its files to this machine."""
    if session.storage.root is None:
        for shard in manifest.shards:
            _fetch(session, manifest, shard)
    return session.checkpoint(manifest)


def _fetch(session: Session, manifest: Manifest, shard: Shard) -> Path:
    """Return the path of a shard on this machine.

    If checkpoints are kept at a URL, the first rank of the node that needs the shard downloads it. Outside a run, each
    process downloads it for itself.
    """
    folder = session.folder_here(manifest.folder)
    target = folder / shard.name
    if session.storage.root is not None:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(os.fsencode(shard.name)).hexdigest()[:16]  # a path may be longer than a file's name may be
    beside = f"{manifest.folder}-{digest}"  # outside the folder, where any name may be a shard's
    with locked(folder.with_name(f"{beside}.lock")):
        if not target.exists():
            part = folder.with_name(f"{beside}.part")
            try:
                session.storage.get(f"{manifest.folder}/{shard.name}", str(part))
            except OSError as error:
                raise OSError(f"{shard.name} cannot be downloaded: {error}") from error
            shards.check(part, shard)
            os.replace(part, target)
    return target


def load_checkpoint(
    state: Any,
    *,
    folder: str | os.PathLike[str] | None = None,
    best: tuple[str, Literal["min", "max"]] | None = None,
    weights_only: bool = True,
) -> int | None:
    """Load the last or best committed checkpoint; see :func:`distributor.runtime.load_checkpoint`."""
    if folder is None and not has_place(_WHAT):
        return None
    session = current(_WHAT, needs_place=folder is None)
    call = _Call(session)
    with session.exchange.taking_part(call.key, _WHAT), closing(call):
        states.check(_WHAT, state)
        session.finish()
        memory = kept_by(session) if folder is None and best is None else None
        call.choose(folder, best)
        passed: dict[str, OSError] = {}
        while (chosen := _choose(call, memory, passed)) is not None:
            name = chosen.folder if isinstance(chosen, Manifest) else f"the state of step {chosen.step} in memory"
            found: TrainingState | OSError | None = _check(call, chosen)
            if found is None:
                call.tell(passed, f"loads {name}")
                found = _read(call, chosen, memory, state, weights_only=weights_only)
            if isinstance(found, TrainingState):
                states.restore(state, found)
                call.ask(b"", lambda _: [b""], patient=True)  # no rank goes on unless all have loaded their state
                call.resume(chosen)
                return chosen.step
            passed[name] = found
            memory = memory if isinstance(chosen, Manifest) else None  # a committed checkpoint is loaded instead
        call.tell(passed, "finds no checkpoint")
        if folder is not None or (best is not None and call.has_any()):
            place, metric = call.session.settings.checkpoints.dir, f" with the metric {best[0]!r}" if best else ""
            last = "; leave best= out to load the last one" if best else ""
            raise ConfigurationError(f"{_WHAT}: there is no checkpoint{metric} in {place!r} that can be loaded{last}")
        if session.exchange.rank == 0 and not passed and (runs := places.named_runs(session.settings.checkpoints.dir)):
            reports.warn(f"{_WHAT}: there is no checkpoint in {session.settings.checkpoints.dir!r}{runs}")
        call.resume(None)
        return None


def load_committed(state: Any, place: str, folder: str) -> None:
    """Load one checkpoint of a place, in a process of no run. OSError: it is gone, or damaged."""
    states.check(_WHAT, state)
    with _of_place(place, folder) as loading:
        states.restore(state, loading.read(state, weights_only=True))


def load_module(module: torch.nn.Module, checkpoints: Checkpoints) -> str:
    """Load the entry ``model``, or the only module, of the best checkpoint, or the last one; return its path.

    It leaves this process's random states alone. OSError: no checkpoint can be read. ConfigurationError: none fits.
    """
    place, passed = checkpoints.dir, dict[str, OSError]()
    catalog = Catalog(open_storage(place), checkpoints)
    manifest = catalog.best(passed, states=True) or catalog.latest(passed, states=True)
    if manifest is None:
        raise OSError(f"there is no checkpoint in {place!r}")
    with _of_place(place, manifest.folder) as loading:
        entry = {loading.entry_of(module): module}
        read = loading.read(entry, weights_only=True)
        own = {name: value for name, value in read.objects.items() if name in entry}
        states.restore(entry, TrainingState(read.tensors, own))
    return f"{place.rstrip('/')}/{manifest.folder}"


@contextmanager
def _of_place(place: str, folder: str) -> Iterator[_Loading]:
    """Load a checkpoint of any place; what has been downloaded of it is removed at the end."""
    session = current(_WHAT, needs_place=False)
    session = session.at(replace(session.settings, checkpoints=Checkpoints(place), memory=None))
    manifest = session.catalog.read(folder)
    if manifest is None:
        raise OSError(f"checkpoint {folder!r} is no longer in {place!r}")
    try:
        loading = _Loading(session, manifest)
        loading.check(manifest.shards)
        yield loading
    finally:
        session.clear_staging()


class _Call:
    """A call of ``load_checkpoint``, in which the ranks exchange values."""

    def __init__(self, session: Session) -> None:
        self.session = self._own = session
        self.key = session.next_key()
        self.best = False
        self._count = 0
        self._who = f" ({who([session.exchange.rank])})" if session.exchange.world_size > 1 else ""

    def choose(self, folder: str | os.PathLike[str] | None, best: tuple[str, Literal["min", "max"]] | None) -> None:
        """Load from another folder, or by a metric."""
        if folder is None and best is None:
            return
        settings = self.session.settings
        found = places.CheckpointPlace(settings.checkpoints.dir)
        if folder is not None:
            name = os.fspath(folder)
            if self._own.storage.root is None and Path(name) == self._own.folder_here(os.path.basename(name)):
                name = f"{found.place}/{os.path.basename(name)}"  # latest_checkpoint() has downloaded it
            answer = self.ask(b"", lambda _: [codec.pack(places.find(name, settings))], patient=True)
            found = codec.read(places.CheckpointPlace, answer)
        self.best = best is not None
        checkpoints = Checkpoints(found.place, best=best)
        self.session = self.session.at(replace(settings, checkpoints=checkpoints, memory=None), found.only)

    def close(self) -> None:
        """Remove what was downloaded from another place outside a run."""
        if self.session is not self._own:
            self.session.clear_staging()

    def ask(self, own: bytes, answer: Callable[[list[bytes]], list[bytes]], *, patient: bool = False) -> bytes:
        """Send a value to rank 0, and return its answer: one for each rank, or the same one for all."""
        self._count += 1
        key, exchange = f"{self.key}/{self._count}", self.session.exchange
        values = exchange.gather(key, own, _WHAT, patient=patient)
        return exchange.share(key, answer(values) if exchange.rank == 0 else [], _WHAT, patient=patient)

    def has_any(self) -> bool:
        """Whether rank 0 finds checkpoints in the place, also such as cannot be chosen."""
        return bool(self.ask(b"", lambda _: [b"any" if self.session.catalog.committed() else b""], patient=True))

    def tell(self, passed: Mapping[str, OSError], what: str) -> None:
        if self.session.exchange.rank == 0:
            _tell_passed(_WHAT, passed, what)

    def resume(self, chosen: Manifest | InMemory | None) -> None:
        """Say on rank 0 from where training continues."""
        if self.session.exchange.rank > 0:
            return
        where = self.session.settings.checkpoints.dir
        own = where == self._own.settings.checkpoints.dir
        match chosen:
            case None:
                reports.resumed(None, where, own=own)
            case Manifest():
                reports.resumed(chosen.step, f"{where}/{chosen.folder}", chosen.time, own=own)
            case InMemory():
                reports.resumed(chosen.step, "the nodes' memory", own=own)

    def attempt(self, read: Callable[[], T]) -> T | OSError:
        """Return what ``read`` returns; the same error on all ranks if it raises an ``OSError`` on any."""
        try:
            found: T | OSError = read()
        except OSError as error:
            found = error
        own = b""
        if isinstance(found, OSError):
            own = json.dumps([isinstance(found, DamagedError), f"{found}{self._who}"]).encode()
        answer = self.ask(own, lambda errors: [next(filter(None, errors), b"")], patient=True)  # reading may take long
        if not answer:
            return found
        is_damaged, text = json.loads(answer)
        return DamagedError(text) if is_damaged else OSError(text)


@dataclass(frozen=True)
class _Choice:
    """What a rank loads: a checkpoint, a state in memory, or nothing."""

    manifest: Manifest | None = None
    in_memory: InMemory | None = None


def _choose(call: _Call, memory: Memory | None, passed: dict[str, OSError]) -> Manifest | InMemory | None:
    """Return what rank 0 chooses for all ranks. It adds to ``passed`` why newer checkpoints cannot be loaded."""

    def answer(offers: list[bytes]) -> list[bytes]:
        kept = choose([codec.read(MemoryOffer, offer) for offer in offers])
        manifest = _committed(call.session, passed, has_state=kept is not None, best=call.best)
        committed = manifest.folder if manifest is not None and manifest.has_state else None
        if kept is not None and is_newer(kept[0].checkpoint, committed):
            return [codec.pack(_Choice(in_memory=each)) for each in kept]
        return [codec.pack(_Choice(manifest))]

    offer = MemoryOffer() if memory is None else memory.offer()
    choice = codec.read(_Choice, call.ask(codec.pack(offer), answer))
    return choice.in_memory or choice.manifest


def _committed(session: Session, passed: dict[str, OSError], *, has_state: bool, best: bool = False) -> Manifest | None:
    try:
        return session.catalog.best(passed, states=True) if best else session.catalog.latest(passed, states=True)
    except OSError as error:
        if not has_state:
            raise
        if not passed:
            passed[session.settings.checkpoints.dir] = error
        return None


def _check(call: _Call, chosen: Manifest | InMemory) -> OSError | None:
    """Return why a file of the checkpoint cannot be loaded, the same on all ranks. Each rank checks some files."""
    if isinstance(chosen, InMemory):  # its bytes are not checked
        return None
    loading, exchange = _Loading(call.session, chosen), call.session.exchange
    return call.attempt(lambda: loading.check(chosen.shards[exchange.rank :: exchange.world_size]))


def _read(
    call: _Call, chosen: Manifest | InMemory, memory: Memory | None, state: Mapping[str, Any], *, weights_only: bool
) -> TrainingState | OSError:
    """Read this rank's state; return an error instead if any rank cannot read its own."""
    if isinstance(chosen, InMemory):
        assert memory is not None
        held = call.attempt(lambda: memory.read(chosen))
        return held if isinstance(held, OSError) else _from_memory(held, state, weights_only=weights_only)
    loading = _Loading(call.session, chosen)
    return call.attempt(lambda: loading.read(state, weights_only=weights_only))


def _from_memory(held: Held, entries: Mapping[str, Any], *, weights_only: bool) -> TrainingState:
    """Return a state from memory as :func:`states.restore` takes it. A module's tensors are copied into its own."""
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
    return TrainingState(tensors, objects)


class _Loading:
    """Loads one checkpoint."""

    def __init__(self, session: Session, manifest: Manifest) -> None:
        self._session = session
        self._manifest = manifest
        self._shards = {shard.name: shard for shard in manifest.shards}

    def check(self, some: Iterable[Shard]) -> None:
        for shard in some:
            path = _fetch(self._session, self._manifest, shard)
            if self._session.storage.root is not None:
                shards.check(path, shard)

    def read(self, entries: Mapping[str, Any], *, weights_only: bool) -> TrainingState:
        """Read this rank's state. A module's values are read into the module's existing tensors."""
        if not self._manifest.has_state:
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
        return TrainingState(tensors, objects)

    def entry_of(self, module: torch.nn.Module) -> str:
        """Return the name of the entry with a module's tensors: ``model``, or the only one."""
        return states.entry_of(list(module.state_dict()), self._metadata().state_dict_metadata)

    @property
    def _has_own_objects(self) -> bool:
        return objects_file(self._session.exchange.rank) in self._shards

    def _objects_path(self) -> Path:
        """Return the path of this rank's objects; of rank 0's if fewer ranks saved the checkpoint."""
        name = objects_file(self._session.exchange.rank if self._has_own_objects else 0)
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
        reader = FileSystemReader(self._session.folder_here(self._manifest.folder))
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(plan, planner).wait()
