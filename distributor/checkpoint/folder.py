"""Checkpoints whose files the ranks write themselves."""

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
    save = publishing.begin(session, "checkpoint_folder", step)
    own = _own_folder(session, save)
    failed = True
    try:
        yield own
        failed = False
    finally:
        try:
            if failed:
                _tell_failed(session, save)
            else:
                _commit(session, save, own)
        finally:
            shutil.rmtree(own, ignore_errors=True)
            with suppress(OSError):  # the folder holds the files of the checkpoint, or those of other ranks
                own.parent.rmdir()


def _own_folder(session: Session, save: Save) -> Path:
    """Return a new folder for this rank, on the file system of the checkpoint if that is a folder."""
    root = session.place.root
    base = session.staging / save.folder if root is None else root / save.folder
    own = base / f".rank-{session.exchange.rank}"
    own.mkdir(parents=True)
    return own


def _tell_failed(session: Session, save: Save) -> None:
    """Tell the other ranks that this rank has failed in the block. Wait for none of them."""
    exchange, part = session.exchange, Part(failed=True)
    with suppress(Exception):  # the failure itself is raised
        if exchange.rank == 0:
            exchange.share(f"{save.key}/1", [_packed([part])], save.what)
        else:
            exchange.gather(f"{save.key}/1", part.encode(), save.what)


def _commit(session: Session, save: Save, own: Path) -> None:
    try:
        part = Part(tuple(shards.found_in(own).values()))
    except OSError as error:
        part = Part(problem=str(error))
    parts = _exchange(session, save, part)
    publishing.check(parts, save.what)
    mine = shards.divide([{each.name: each for each in part.shards} for part in parts], save.what)
    problem = next((each.problem for each in parts if each.problem), None) or _publish(
        session, save, own, mine[session.exchange.rank]
    )
    done = Part(mine[session.exchange.rank], problem=problem)
    publishing.conclude(session, save, done)


def _exchange(session: Session, save: Save, part: Part) -> list[Part]:
    """Return the parts of all ranks."""
    told = session.exchange.gather(f"{save.key}/1", part.encode(), save.what)
    everything = _packed([Part.decode(each) for each in told])
    return [
        Part.decode(each.encode())
        for each in json.loads(session.exchange.share(f"{save.key}/1", [everything], save.what))
    ]


def _packed(parts: Sequence[Part]) -> bytes:
    return json.dumps([part.encode().decode() for part in parts]).encode()


def _publish(session: Session, save: Save, own: Path, files: Sequence[Shard]) -> str | None:
    """Put files where the checkpoint is. Return why that failed, if it did."""
    try:
        for shard in files:
            session.place.upload(str(own / shard.name), f"{save.folder}/{shard.name}")
        session.place.settle(save.folder)
    except OSError as error:
        return str(error)
    return None
