"""The end of each save: if all ranks have done their part, rank 0 commits the checkpoint and tells the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field

from distributor.checkpoint.catalog import Draft
from distributor.checkpoint.records import Shard
from distributor.checkpoint.session import Session
from distributor.errors import ConfigurationError
from distributor.metrics import rank as reports
from distributor.text import notices
from distributor.text.wording import who

_log = notices.logger

#: A function that rank 0 calls with the reports of all ranks before the commit. It writes further files of the
#: checkpoint, and returns their sizes and digests.
Complete = Callable[[Sequence["Part"]], Sequence[Shard]]


@dataclass(frozen=True)
class Save:
    """The description of one save, which is the same on all ranks except for the metrics.

    Attributes:
        what: the user's call, such as ``save_checkpoint(step=100)``.
        step: the step of the training.
        key: the beginning of all keys under which ranks exchange values about this save in their shared store.
        folder: name of the checkpoint's folder.
        metrics: the last value of each metric that this rank reported before the save began, by the metric's name. A
            metric whose last value is not finite is missing.
    """

    what: str
    step: int
    key: str
    folder: str
    metrics: Mapping[str, float] = field(default_factory=dict)


def _check_step(call: str, step: int) -> None:
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise ConfigurationError(f"{call}: step must be a whole number of at least 0, not {step!r}")


def begin(session: Session, call: str, step: int) -> Save:
    """Return the description of the next save, with a new key and the name of a new folder.

    Raises:
        ConfigurationError: ``step`` is not a whole number of at least 0.
    """
    key, what = session.next_key(), f"{call}(step={step!r})"
    with session.exchange.taking_part(key, what):
        _check_step(call, step)
    folder = session.new_folder(int(step), key)
    return Save(f"{call}(step={step})", int(step), key, folder, _numbers(reports.latest()))


@contextmanager
def taking_part(session: Session, save: Save, where: str = "in the call") -> Iterator[None]:
    """Tell the other ranks if this rank fails in the ``with`` block, so that they do not wait for it in this save.

    Rank 0 removes the files of the save before its next commit, when no rank writes them any more.

    Args:
        session: what this process uses to save checkpoints: their folder or URL, and access to the other ranks.
        save: describes the save.
        where: where this rank fails, for the error of the ranks that wait for it.
    """
    with session.exchange.taking_part(save.key, save.what, where):
        try:
            yield
        except BaseException:
            if session.exchange.rank == 0:
                session.unfinished.append(save.folder)
            raise


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that are finite numbers, because JSON has neither infinity nor NaN."""
    return {name: value for name, value in values.items() if abs(value) < float("inf")}


@dataclass(frozen=True)
class Part:
    """A rank's report about its part of a save.

    Attributes:
        shards: the files that the rank adds to the checkpoint.
        problem: why the files could not be written; ``None`` if they were written.
        more: further data, as text, that rank 0 needs to complete the checkpoint.
    """

    shards: tuple[Shard, ...] = ()
    problem: str | None = None
    more: str = ""

    def encode(self) -> bytes:
        """Return this report about a rank's part of a save as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """Return the report about a rank's part of a save from the JSON that :meth:`encode` has made of it."""
        told = json.loads(data)
        return cls(**{**told, "shards": tuple(Shard(**shard) for shard in told["shards"])})


def said(error: Exception) -> str:
    """Return an error as text, for the field ``problem`` of a :class:`Part` (a rank's report about a save)."""
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def conclude(session: Session, save: Save, part: Part, complete: Complete | None = None) -> bool:
    """Report this rank's part of a save to rank 0, which commits the checkpoint, or removes it if any part has failed.

    Args:
        session: what this process uses to save checkpoints: their folder or URL, and access to the other ranks.
        save: describes the save.
        part: this rank's report about its part.
        complete: on rank 0, a function that writes further files before the commit; ``None`` if there are none.

    Returns:
        Whether the checkpoint was committed. If not, rank 0 logs a warning.

    Raises:
        ConfigurationError: a rank has ended before it has done its part.
        RuntimeError: another rank has failed before it has done its part.
    """
    exchange, key = session.exchange, f"{save.key}/done"
    told = exchange.gather(key, part.encode(), save.what, patient=True)
    outcome = b""
    if exchange.rank == 0 and _commit(session, save, [Part.decode(each) for each in told], complete):
        outcome = b"committed"
    committed = exchange.share(key, [outcome], save.what, patient=True) != b""
    if committed:
        session.last = save.folder
    return committed


def _commit(session: Session, save: Save, parts: Sequence[Part], complete: Complete | None) -> bool:
    """Commit a checkpoint on rank 0. Return whether this has succeeded."""
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
        session.catalog.commit(draft)
    except Exception as error:  # any error: the other ranks wait for the outcome
        session.catalog.discard(save.folder)
        _log.warning("%s: nothing was saved, and training goes on: %s", save.what, said(error))
        return False
    reports.committed(save.step, f"{session.settings.checkpoints.dir}/{save.folder}")
    return True


def _remove_unfinished(session: Session) -> None:
    """On rank 0, remove the files of saves in which a rank has failed, unless the checkpoint was committed before."""
    while session.unfinished:
        folder = session.unfinished.pop()
        with suppress(OSError):  # a later commit removes what remains
            if not session.catalog.is_committed(folder):
                session.catalog.discard(folder)
