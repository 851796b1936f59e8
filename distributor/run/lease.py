"""The lease of a name or folder of checkpoints: one run at a time has it, renews it, and notices if it is taken.

Its record is beside the checkpoints: see :mod:`distributor.values.lease_record`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from distributor.errors import RunCancelledError, StartError
from distributor.machine import processes
from distributor.machine.storage import open_storage
from distributor.text import notices
from distributor.values import lease_record
from distributor.values.job import Job
from distributor.values.lease_record import FILES, FencingToken, Holder, LeaseRecord
from distributor.values.sealed import seal

_log = notices.logger


@dataclass(frozen=True)
class Times:
    """The times of a lease, in seconds."""

    renew: float = 2.0  # between two renewals
    expire: float = 8.0  # without a renewal, until the holder counts as ended
    settle: float = 0.2  # until a new record is read again, in case another run writes one at the same moment
    look: float = 0.25  # between two checks of another run's record


class Records(Protocol):
    """The part of :class:`Storage` that a lease needs."""

    def write(self, name: str, data: bytes) -> None: ...

    def read(self, name: str) -> bytes | None: ...


class Lease:
    """A run's right to its checkpoints: its record is read, written, renewed and released here.

    With a name, ``job`` has the folder for checkpoints of the training that the run begins or continues. A lease
    without a ``storage`` does nothing.
    """

    def __init__(
        self, job: Job, storage: Records | None = None, times: Times | None = None, thing: str | None = None
    ) -> None:
        self.job = job
        self._storage = storage
        self._what = thing
        self._times = Times() if times is None else times
        self._record: LeaseRecord | None = None
        self._finished = False
        self._warned = False  # that the lease cannot be released
        self._ended = threading.Event()
        self._writing = threading.Lock()

    @property
    def _thing(self) -> str:
        """What the run holds, in words."""
        if self._what is not None:
            return self._what
        assert self.job.checkpoints is not None
        identity, where = self.job.identity, self.job.checkpoints.dir
        return f"the folder {where!r} for checkpoints" if identity is None else f"the name {identity.name!r}"

    def read(self) -> LeaseRecord | None:
        return None if self._storage is None else lease_record.find(self._storage.read)

    def _write(self, record: LeaseRecord) -> None:
        assert self._storage is not None
        self._storage.write(FILES[record.sequence % 2], seal(record))
        self._record = record

    def acquire(self, wanted: Callable[[], bool]) -> int:
        """Return the number of the training under this name, once an earlier holder has ended or expired.

        If another run writes its record at the same moment, a run with a name, or a study, finds out here, others at
        their first renewal. StartError: the holder still renews. RunCancelledError: the run is no longer ``wanted()``.
        """
        here = _here(self.job.run_id)
        last = self._await_end(here, wanted)
        record = self._following(last, here)
        self._write(record)
        if self.job.identity is None and self._what is None:
            return record.training
        time.sleep(self._times.settle)
        again = self.read()
        if again is None or again.run != here.run:
            raise self._held(None if again is None else again.holder, here)
        return record.training

    def _following(self, last: LeaseRecord | None, here: Holder) -> LeaseRecord:
        """Return this run's record, and warn if the run differs from the last one of its name."""
        identity = self.job.identity
        if identity is None:
            return lease_record.taken(last, here)
        record = lease_record.following(last, identity, here)
        if last is not None and record.training == last.training:
            changed = ", ".join(lease_record.changes(last, identity))
            text = "this run differs from the last one of its name"
            goes_on = ", which had finished, and goes on from its last checkpoint" if last.finished else ""
            if changed:
                _log.warning("run %s: %s (run %s) in %s%s", self.job.label, text, last.run, changed, goes_on)
        return record

    def _await_end(self, here: Holder, wanted: Callable[[], bool]) -> LeaseRecord | None:
        """Return the last run's record once that run has ended or expired; ``None`` if there was none."""
        first: LeaseRecord | None = None
        since = 0.0
        while True:
            found = self.read()
            now = time.monotonic()  # a read may take long
            if found is None or found.holder is None or _has_ended(found.holder, here):
                return found
            if first is None:
                first, since = found, now
                waiting = f"{self._thing}: waiting to see whether it has ended, for at most {self._times.expire:g} s"
                _log.warning("run %s: %s holds %s", self.job.label, found.holder, waiting)
            elif found.sequence != first.sequence:
                raise self._held(found.holder, here)
            elif now - since > self._times.expire:
                return found
            if not wanted():
                raise RunCancelledError(
                    f"run {self.job.label} was cancelled while it waited for another run to release {self._thing}"
                )
            time.sleep(self._times.look)

    def renew_until_end(self, lost: Callable[[str], object]) -> None:
        """Renew the lease until :meth:`release`. If it is another run's, tell ``lost`` in words, and end."""
        warned, pause = False, self._times.settle
        while not self._ended.wait(pause):
            pause = self._times.renew
            try:
                with self._writing:
                    if self._ended.is_set():
                        return
                    if (other := self._other()) is not None:
                        lost(other)
                        return
                    assert self._record is not None
                    self._write(self._record.renewed())
                warned = False
            except OSError as error:
                if not warned:
                    _log.warning("run %s: cannot renew its lease of %s: %s", self.job.label, self._thing, error)
                warned = True

    def advance(self, job: Job) -> Job:
        """From now on, let only the ranks of ``job``, the run's next job, commit checkpoints. Return it for them.

        OSError if the place fails for longer than a lease lasts.
        """
        if job.fence is None:
            return job
        until = time.monotonic() + self._times.expire
        while True:
            try:
                self._advance(job.attempt)
                return replace(job, fence=replace(job.fence, attempt=job.attempt))
            except OSError:
                if time.monotonic() > until:
                    raise
            time.sleep(self._times.look)

    def _advance(self, attempt: int) -> None:
        with self._writing:
            if self._record is not None and self._other() is None:  # otherwise the run ends
                self._write(self._record.advanced(attempt))

    def _other(self) -> str | None:
        """Return which other run holds the lease now, in words; ``None`` if none does, as where its record is gone."""
        found = self.read()
        if found is None or found.run == self.job.run_id:
            return None
        return f"{found.holder or f'run {found.run}'} holds {self._thing} now"

    def _held(self, holder: Holder | None, here: Holder) -> StartError:
        other = "folder" if self.job.identity is None and self._what is None else "name"
        if self._what is None and holder is not None and replace(holder, run=here.run) == here:
            return StartError(
                f"{self._thing} is held by run {holder.run} of this process: distributor.runs().active has its "
                f"handle, to wait for it or to cancel it; or pass another {other}"
            )
        return StartError(
            f"{self._thing} is held by {holder or 'another run'}: wait until that run has ended, cancel it, or pass "
            f"another {other}"
        )

    def release(self, *, finished: bool) -> None:
        """Stop renewing, and mark the name or folder as free.

        RunCancelledError: the training is finished, but another run had taken it. Since then, ranks of this run
        could not commit checkpoints, so the last ones may be missing.
        """
        self._ended.set()
        with self._writing:
            if self._record is None or self._record.holder is None:
                return
            self._finished = self._finished or finished
            try:
                other = self._other()
                if other is None:
                    is_named = self.job.identity is not None
                    self._write(self._record.released(finished=self._finished if is_named else self._record.finished))
            except OSError as error:
                text = "so the next run must wait, and then continues this training"
                if not self._warned:
                    _log.warning("run %s: cannot release %s, %s: %s", self.job.label, self._thing, text, error)
                self._warned = True  # at the run's end, hold() tries once more
                return
        if other is not None and finished:
            raise RunCancelledError(f"run {self.job.label} was cancelled: {other}")


@contextmanager
def hold(
    job: Job,
    wanted: Callable[[], bool],
    lost: Callable[[str], object],
    times: Times | None = None,
    *,
    storage: Records | None = None,
    thing: str | None = None,
) -> Iterator[Lease]:
    """Hold the name of a run or, without one, its folder for checkpoints during the ``with`` block.

    In another thread, ``lost`` gets a sentence if the run loses it. StartError: another run uses it, or the driver
    cannot reach the place for checkpoints of a run with a name, or of a ``thing``. Otherwise, it then only warns.
    ``storage`` is the place of the record if it is not beside the checkpoints, and ``thing`` in words what is held.
    """
    lease = _acquire(job, wanted, times, storage, thing) if job.checkpoints is not None else Lease(job)
    if lease.job.fence is None:
        yield lease
        return
    thread = threading.Thread(target=lease.renew_until_end, args=(lost,), name="distributor-lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        with suppress(RunCancelledError):
            lease.release(finished=False)
        thread.join()


def _acquire(
    job: Job, wanted: Callable[[], bool], times: Times | None, storage: Records | None, thing: str | None
) -> Lease:
    assert job.checkpoints is not None
    place, name = job.checkpoints.dir, None if job.identity is None else job.identity.name
    where = place if name is None else lease_record.folder_of(place, name)
    try:
        lease = Lease(job, open_storage(where, job.run_id) if storage is None else storage, times, thing)
        training = lease.acquire(wanted)
    except OSError as error:
        if thing is not None:
            raise StartError(f"{thing} cannot be kept in {place}: {error}") from None
        why = f"checkpoints {place!r} cannot be used by the driver"
        if name is not None:
            raise StartError(f"{why}: {error}") from None
        _log.warning("run %s: %s, so it does not see whether another run uses them: %s", job.label, why, error)
        return Lease(job)
    if name is not None:
        place = lease_record.training_folder(where, training)
    fence = FencingToken(where, job.run_id, is_named=name is not None)
    lease.job = replace(job, checkpoints=replace(job.checkpoints, dir=place), fence=fence)
    return lease


def _here(run: str) -> Holder:
    pid = os.getpid()
    return Holder(run, socket.gethostname(), processes.pid_scope(), pid, processes.start_time(pid) or "")


def _has_ended(holder: Holder, here: Holder) -> bool:
    """Whether a holder's driver is known to have ended. Only its own machine can know."""
    same = holder.machine == here.machine and bool(here.machine and holder.started)
    return same and processes.has_ended(holder.pid, holder.started)
