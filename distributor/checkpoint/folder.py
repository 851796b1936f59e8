"""``checkpoint_folder``: checkpoints whose files are written by the user's code in each rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from distributor.checkpoint import publishing, shards
from distributor.checkpoint.publishing import Part, Save
from distributor.checkpoint.records import Shard
from distributor.checkpoint.session import Session, current


@contextmanager
def checkpoint_folder(step: int) -> Iterator[Path]:
    """Yield an empty folder for this rank's files; see :func:`distributor.runtime.checkpoint_folder`."""
    session = current("checkpoint_folder")
    session.finish()
    publishing.check_step("checkpoint_folder", step)
    save = publishing.begin(session, "checkpoint_folder", step)
    own, problem = _own_folder(session, save)
    failed = True
    try:
        yield own
        failed = False
    finally:
        try:
            if failed:
                _tell_failed(session, save)
            else:
                _commit(session, save, own, problem)
        finally:
            shutil.rmtree(own, ignore_errors=True)
            with suppress(OSError):  # not empty: files of the checkpoint or of other ranks
                own.parent.rmdir()


def _own_folder(session: Session, save: Save) -> tuple[Path, str | None]:
    """Return a new folder for this rank's files, and an error text (``None`` if there is no error).

    The user's code writes this rank's files into a new folder. If checkpoints are kept in a folder and not at a URL,
    the new folder is created inside the folder of the checkpoint, so that the files can later be moved to their place
    without copying. If the new folder cannot be created there, return a temporary folder, and an error text that says
    why.
    """
    name, root = f".rank-{session.exchange.rank}", session.place.root
    if root is not None:
        own = root / save.folder / name
        try:
            own.mkdir(parents=True)
            return own, None
        except OSError as error:
            problem = str(error)
    own = session.staging / save.folder / name
    own.mkdir(parents=True)
    return own, None if root is None else problem


def _tell_failed(session: Session, save: Save) -> None:
    """Tell the other ranks, without waiting for them, that this rank's ``with`` block for the checkpoint has failed."""
    exchange, part = session.exchange, Part(failed=True)
    with suppress(Exception):  # the user's own error is raised, and not one of this function
        if exchange.rank == 0:
            exchange.share(f"{save.key}/1", [_packed([part])], save.what)
        else:
            exchange.gather(f"{save.key}/1", part.encode(), save.what)


def _commit(session: Session, save: Save, own: Path, problem: str | None) -> None:
    part = Part(problem=problem)
    if problem is None:
        try:
            part = Part(tuple(shards.found_in(own).values()))
        except Exception as error:  # any error: the other ranks wait for this report
            part = Part(problem=publishing.said(error))
    parts = _exchange(session, save, part)
    publishing.check(parts, save.what)
    mine = shards.divide([{each.name: each for each in part.shards} for part in parts], save.what)
    files = mine[session.exchange.rank]
    problem = next((each.problem for each in parts if each.problem), None) or _publish(session, save, own, files)
    publishing.conclude(session, save, Part(files, problem=problem))


def _exchange(session: Session, save: Save, part: Part) -> list[Part]:
    """Send the report about this rank's part of a save to all other ranks, and return the reports of all ranks."""
    key = f"{save.key}/1"
    told = session.exchange.gather(key, part.encode(), save.what)
    everything = _packed([Part.decode(each) for each in told])
    return [Part.decode(each.encode()) for each in json.loads(session.exchange.share(key, [everything], save.what))]


def _packed(parts: Sequence[Part]) -> bytes:
    return json.dumps([part.encode().decode() for part in parts]).encode()


def _publish(session: Session, save: Save, own: Path, files: Sequence[Shard]) -> str | None:
    """Move or upload this rank's files to the checkpoint's folder. Return an error text; ``None`` if this succeeds."""
    try:
        for shard in files:
            session.place.upload(str(own / shard.name), f"{save.folder}/{shard.name}")
        session.place.settle(save.folder)
    except Exception as error:  # any error: the other ranks wait for this report
        return publishing.said(error)
    return None
