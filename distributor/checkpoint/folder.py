"""``checkpoint_folder``: checkpoints whose files are written by the user's code in each rank."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from distributor.checkpoint import publishing, shards
from distributor.checkpoint.context import Session, current
from distributor.checkpoint.publishing import Part, Save
from distributor.checkpoint.records import Shard
from distributor.errors import ConfigurationError
from distributor.values import codec


@contextmanager
def checkpoint_folder(step: int) -> Iterator[Path]:
    """Yield an empty folder for this rank's files; see :func:`distributor.runtime.checkpoint_folder`."""
    session = current("checkpoint_folder")
    save = publishing.begin(session, "checkpoint_folder", step)
    with publishing.taking_part(session, save, "in the with block"):
        session.finish()
        _meet(session, save)
        with _own_folder(session, save) as (own, problem):
            yield own
            session.finish()  # of a save in the block
            _commit(session, save, own, _own_part(own, problem))


def _meet(session: Session, save: Save) -> None:
    """Wait until all ranks have made this call. From then on, they wait for each other without a time limit."""
    session.exchange.gather(f"{save.key}/1", b"", save.what)
    session.exchange.share(f"{save.key}/1", [b""], save.what)


@contextmanager
def _own_folder(session: Session, save: Save) -> Iterator[tuple[Path, str | None]]:
    """Yield a new folder for this rank's files, and an error text or ``None``. Then remove the folder.

    If possible, it is inside the folder of the checkpoint, so that the files can be moved to their place without
    copying. Otherwise it is a temporary folder, and the text says why.
    """
    own, problem = _create(session, save)
    try:
        yield own, problem
    finally:
        shutil.rmtree(own, ignore_errors=True)
        with suppress(OSError):  # not empty: files of the checkpoint or of other ranks
            own.parent.rmdir()


def _create(session: Session, save: Save) -> tuple[Path, str | None]:
    name, root = f".rank-{session.exchange.rank}", session.storage.root
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


def _own_part(own: Path, problem: str | None) -> Part:
    if problem is not None:
        return Part(problem=problem)
    try:
        return Part(tuple(shards.found_in(own).values()))
    except ConfigurationError:
        raise
    except Exception as error:  # any other error: nothing is saved, and training goes on
        return Part(problem=publishing.said(error))


def _commit(session: Session, save: Save, own: Path, part: Part) -> None:
    parts = _exchange(session, save, part)
    mine = shards.divide([{each.name: each for each in part.shards} for part in parts], save.what)
    files = mine[session.exchange.rank]
    problem = next((each.problem for each in parts if each.problem), None) or _publish(session, save, own, files)
    publishing.warn_unless_saved(session, save, publishing.conclude(session, save, Part(files, problem=problem)))


def _exchange(session: Session, save: Save, part: Part) -> list[Part]:
    """Exchange the reports of all ranks, without a time limit: the user's code may write for a long time."""
    key, exchange = f"{save.key}/2", session.exchange
    parts = exchange.gather(key, codec.pack(part), save.what, patient=True)
    answer = exchange.share(key, [b"[" + b",".join(parts) + b"]"], save.what, patient=True)
    return list(codec.read(tuple[Part, ...], answer))


def _publish(session: Session, save: Save, own: Path, files: Sequence[Shard]) -> str | None:
    """Move or upload this rank's files to the checkpoint's folder. Return an error text; ``None`` if this succeeds."""
    try:
        for shard in files:
            session.storage.upload(str(own / shard.name), f"{save.folder}/{shard.name}")
        session.storage.sync(save.folder)
    except Exception as error:  # any error: the other ranks wait for this report
        return publishing.said(error)
    return None
