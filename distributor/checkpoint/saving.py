"""``save_checkpoint``: copies the state of the training, and writes the copies while training goes on."""

from __future__ import annotations

import base64
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distributor.checkpoint import plans, publishing, shards, training_state as states
from distributor.checkpoint.context import Checkpoint, Session, current
from distributor.checkpoint.memory.memory import Memory, Room, kept_by
from distributor.checkpoint.memory.states import Seat
from distributor.checkpoint.publishing import Part, Save, SaveOutcome
from distributor.checkpoint.records import METADATA, Shard, objects_file
from distributor.metrics import rank as reports
from distributor.text import notices
from distributor.text.wording import size

_log = notices.logger

_NICE = 15  # of a save beside training: it takes what training leaves, and a thirtieth of a CPU's time, sched(7)


@dataclass
class _Kept:
    """What a rank reuses from one save to the next, such as its plan and memory for copies."""

    session: Session
    planner: plans.Planner
    copies: plans.PlannedCopies
    memory: Memory | None
    checked: frozenset[bytes] = frozenset()  # names of classes in objects that load_checkpoint does not refuse

    def copy(
        self, save: Save, tensors: Mapping[str, torch.Tensor], objects: bytes, *, stay: bool
    ) -> dict[str, torch.Tensor]:
        """Copy the tensors that this rank writes or keeps in memory; others become stand-ins without data."""
        names, room = self.planner.names, Room()
        if self.memory is not None:
            left_out = self.planner.left_out
            kept = {name: tensor for name, tensor in tensors.items() if name not in left_out}
            room = self.memory.begin(save.folder, save.step, kept, left_out)
        copies = self.copies.of(tensors, names | room.keys(), room, stay=stay)
        if self.memory is not None:
            self.memory.seal(objects)
        return copies


_kept: _Kept | None = None


def save_checkpoint(
    state: Mapping[str, Any], step: int, *, wait: bool = False, weights_only: bool = True
) -> Checkpoint | None:
    """Save the state of the training; see :func:`distributor.runtime.save_checkpoint`."""
    session = current("save_checkpoint")
    save = publishing.begin(session, "save_checkpoint", step)
    with publishing.taking_part(session, save):
        states.check("save_checkpoint", state)
        found = states.collect(state)
        objects, kept, plan = states.pack_objects(found.objects), _keep(session), None
        if weights_only and not (names := states.names_in(objects)) <= kept.checked:
            states.check_weights_only(objects)
            kept.checked |= names
        session.finish()
        if not kept.planner.is_same(found.tensors):  # the new plan says which tensors to copy below
            plan = kept.planner.settle(save.key, found.tensors, states.samples(state), save.what)
        left_out = kept.planner.left_out
        copies = kept.copy(save, found.tensors, objects, stay=wait)
        task = _Task(kept, save, plan, copies, objects, left_out)
        if not wait:
            session.save_later(task.run_calmly)
            return None
        outcome = task.run()
    if outcome.manifest is None:
        raise OSError(f"{save.what}: nothing was saved: {outcome.problem}")
    return session.checkpoint(outcome.manifest)


def _keep(session: Session) -> _Kept:
    global _kept
    if _kept is None or _kept.session is not session:
        about = session.settings.memory
        memory = kept_by(session)
        seat = Seat("" if about is None else about.folder)
        if memory is not None and memory.peers is not None:
            seat = memory.peers.seat
        _kept = _Kept(session, plans.Planner(session.exchange, seat), plans.PlannedCopies(), memory)
    return _kept


@dataclass
class _Task:
    kept: _Kept
    save: Save
    plan: Any
    tensors: Mapping[str, torch.Tensor]
    objects: bytes
    left_out: frozenset[str]

    def run_calmly(self) -> None:
        """Call :meth:`run` in a thread, while training goes on. If it fails, log a warning."""
        session, save = self.kept.session, self.save
        os.nice(_NICE)  # on Linux, of this thread alone: setpriority(2)
        try:
            with publishing.taking_part(session, save):
                publishing.warn_unless_saved(session, save, self.run())
        except Exception as error:
            _log.warning("%s: nothing was saved, and training goes on: %s", save.what, error)
            if session.exchange.rank == 0:
                reports.unsaved(save.step, str(error))

    def run(self) -> SaveOutcome:
        """Write this rank's part of a checkpoint, and commit the checkpoint with the other ranks."""
        session, save, planner = self.kept.session, self.save, self.kept.planner
        plan = self.plan if self.plan is not None else planner.settle(save.key, self.tensors, {}, save.what)
        if self.kept.memory is not None:
            if planner.left_out != self.left_out:
                self.kept.memory.revoke(save.folder)  # other ranks now keep other tensors: the state may lack some
            self.kept.memory.replicate(save.folder, self.objects, planner.omitted, planner.peer)
        part, folder = Part(), None
        try:
            folder = self._folder()
            files, results = self._write(plan, folder)
            self._upload(folder, files)
            if session.exchange.rank > 0:  # rank 0 has one more file to write
                session.storage.sync(save.folder)
            part = Part(tuple(files), more=base64.b64encode(results).decode())
        except Exception as error:  # any error: the other ranks wait for this report
            part = Part(problem=publishing.said(error))
        try:
            return publishing.conclude(session, save, part, self._complete if session.exchange.rank == 0 else None)
        finally:
            if session.storage.root is None and folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self) -> Path:
        root = self.kept.session.storage.root
        return (self.kept.session.staging if root is None else root) / self.save.folder

    def _write(self, plan: Any, folder: Path) -> tuple[list[Shard], bytes]:
        """Write this rank's files. Return them, and where each part of a tensor is in them."""
        folder.mkdir(parents=True, exist_ok=True)
        missing = {item.index.fqn for item in plan.items} - {
            name for name, tensor in self.tensors.items() if tensor.device.type != "meta"
        }
        if missing:  # another rank's plan has changed since the tensors were copied
            raise OSError(
                "the tensors of another rank have changed since the last save, so this rank must now write the tensor "
                f"{min(missing)!r}, which it has not copied; the next save will be complete"
            )
        name = objects_file(self.kept.session.exchange.rank)
        try:
            files, results = plans.write(plan, self.tensors, folder)
            with shards.MeasuredFile(folder / name, name) as file:
                file.write(self.objects)
            return [*files, file.shard], results
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            names = {item.index.fqn for item in plan.items}
            needed = sum(states.local_part(self.tensors[each]).nbytes for each in names) + len(self.objects)
            raise OSError(_full(folder, needed)) from error

    def _complete(self, parts: Sequence[Part]) -> list[Shard]:
        """On rank 0, write and return the file in which DCP describes the checkpoint."""
        folder = self._folder()
        plans.write_metadata(self.kept.planner.metadata, [base64.b64decode(part.more) for part in parts], folder)
        files = [shards.measured(folder / METADATA, METADATA)]
        self._upload(folder, files)
        self.kept.session.storage.sync(self.save.folder)
        return files

    def _upload(self, folder: Path, files: Sequence[Shard]) -> None:
        storage = self.kept.session.storage
        if storage.root is None:
            for each in files:
                storage.upload(str(folder / each.name), f"{self.save.folder}/{each.name}")


def _full(folder: Path, needed: int) -> str:
    """Return in words how much a rank has to write to a full disk, and how much room the ranks have found there."""
    room = shutil.disk_usage(folder).free + sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return (
        f"the disk of {folder.parent} is full: this rank has to write {size(needed)}, and there was room for "
        f"{size(room)} in all: free some space, or keep fewer checkpoints"
    )
