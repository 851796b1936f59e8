"""The end of each save: if all ranks have done their part, rank 0 commits the checkpoint and tells the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from distributor.checkpoint.catalog import Draft
from distributor.checkpoint.context import Session
from distributor.checkpoint.records import Manifest, Shard
from distributor.errors import ConfigurationError
from distributor.metrics import rank as reports
from distributor.text import notices
from distributor.text.wording import who
from distributor.values import codec

_log = notices.logger

#: Writes and returns further files of a checkpoint, on rank 0 before the commit, given the reports of all ranks.
Complete = Callable[[Sequence["Part"]], Sequence[Shard]]


@dataclass(frozen=True)
class Save:
    """One save, the same on all ranks except for the metrics."""

    what: str  # the user's call, such as ``save_checkpoint(step=100)``
    step: int
    key: str  # the beginning of this save's keys in the store that the ranks share
    folder: str
    metrics: Mapping[str, float] = field(default_factory=dict)  # as in ``Manifest``, but of this rank


def _check_step(call: str, step: int) -> None:
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise ConfigurationError(f"{call}: step must be a whole number of at least 0, not {step!r}")


def begin(session: Session, call: str, step: int) -> Save:
    """Return the next save, with a new key and the name of a new folder."""
    key, what = session.next_key(), f"{call}(step={step!r})"
    with session.exchange.taking_part(key, what):
        _check_step(call, step)
    folder = session.new_folder(int(step), key)
    return Save(f"{call}(step={step})", int(step), key, folder, _numbers(reports.latest()))


@contextmanager
def taking_part(session: Session, save: Save, where: str = "in the call") -> Iterator[None]:
    """Tell the other ranks if this rank fails in the ``with`` block, so that they do not wait for it in this save."""
    with session.exchange.taking_part(save.key, save.what, where):
        try:
            yield
        except BaseException:
            if session.exchange.rank == 0:
                session.unfinished.append(save.folder)  # at the next commit, no rank writes there any more
            raise


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that are finite numbers, because JSON has neither infinity nor NaN."""
    return {name: value for name, value in values.items() if abs(value) < float("inf")}


@dataclass(frozen=True)
class Part:
    """A rank's report about its part of a save."""

    shards: tuple[Shard, ...] = ()
    problem: str | None = None  # why the files could not be written
    more: str = ""  # further data with which rank 0 completes the checkpoint


def said(error: Exception) -> str:
    """Return an error as text, for the field ``problem`` of a :class:`Part`."""
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class SaveOutcome:
    """How a save has ended, the same on all ranks: its checkpoint, or why there is none."""

    manifest: Manifest | None = None  # without its shards, of which there are some for each rank
    problem: str = ""


def conclude(session: Session, save: Save, part: Part, complete: Complete | None = None) -> SaveOutcome:
    """Report this rank's part to rank 0, which commits or removes the checkpoint."""
    exchange, key = session.exchange, f"{save.key}/done"
    parts = exchange.gather(key, codec.pack(part), save.what, patient=True)
    outcome = SaveOutcome()
    if exchange.rank == 0:
        outcome = _commit(session, save, [codec.read(Part, data) for data in parts], complete)
    outcome = codec.read(SaveOutcome, exchange.share(key, [codec.pack(outcome)], save.what, patient=True))
    if outcome.manifest is not None:
        session.last, session.problem = save.folder, ""
    return outcome


def warn_unless_saved(session: Session, save: Save, outcome: SaveOutcome) -> None:
    """Log on rank 0 why nothing was saved, where training goes on without a checkpoint: once while saves fail alike."""
    problem = re.sub(r"\d+", "", outcome.problem)  # such as how much room a full disk has
    if problem and problem != session.problem and session.exchange.rank == 0:
        _log.warning("%s: nothing was saved, and training goes on: %s", save.what, outcome.problem)
    session.problem = problem


def _commit(session: Session, save: Save, parts: Sequence[Part], complete: Complete | None) -> SaveOutcome:
    _remove_unfinished(session)
    try:
        problem = next((f"{part.problem} ({who([rank])})" for rank, part in enumerate(parts) if part.problem), None)
        if problem is not None:
            raise OSError(problem)
        shards = [shard for part in parts for shard in part.shards]
        if complete is not None:
            shards += complete(parts)
        session.check_fence()
        draft = Draft(save.folder, save.step, len(parts), session.origin, tuple(shards), save.metrics)
        manifest = session.catalog.commit(draft)
    except Exception as error:  # any error: the other ranks wait for the outcome
        session.catalog.discard(save.folder)
        reports.unsaved(save.step, said(error))
        return SaveOutcome(problem=said(error) or type(error).__name__)
    reports.committed(save.step, f"{session.settings.checkpoints.dir}/{save.folder}")
    return SaveOutcome(replace(manifest, shards=()))


def _remove_unfinished(session: Session) -> None:
    """On rank 0, remove the files of saves in which a rank has failed, unless the checkpoint was committed before."""
    while session.unfinished:
        folder = session.unfinished.pop()
        with suppress(OSError):  # a later commit removes what remains
            if not session.catalog.is_committed(folder):
                session.catalog.discard(folder)
