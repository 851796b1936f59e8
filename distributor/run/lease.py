"""Claims a run's name (reserves it), renews the claim during the run, and notices if another run takes the name.

At most one run at a time may use a name (``name=``). A *claim* is a small record, in the folder or URL for checkpoints,
that says which run uses the name. The driver writes the claim.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from distributor.errors import RunCancelledError, StartError
from distributor.machine import processes
from distributor.machine.places import Place, open_place
from distributor.text import notices
from distributor.values import claims
from distributor.values.claims import FILES, Claim, Fence, Holder, Identity
from distributor.values.job import Job
from distributor.values.sealed import seal

_log = notices.logger


@dataclass(frozen=True)
class Times:
    """The time settings of a claim (the record that reserves a name for a run), in seconds.

    Attributes:
        renew: time between two renewals of a claim.
        expire: time without a renewal after which the run that holds a claim counts as ended.
        settle: time from writing a new claim until it is read again, in case another run writes one at the same moment.
        look: time between two checks of a claim that another run holds.
    """

    renew: float = 2.0
    expire: float = 8.0
    settle: float = 0.2
    look: float = 0.25


class Tenure:
    """A run's right to its name, which no other run may use until this run ends. :func:`hold` creates this object.

    Args:
        job: the run's job. If the run has a name, the run's checkpoints go to ``job.checkpoints.dir``, the folder of
            the training that the run begins or continues under this name.
        keeper: reads and writes the claim (the record that reserves the name); ``None`` for a run without a name.
    """

    def __init__(self, job: Job, keeper: Keeper | None = None) -> None:
        self.job = job
        self._keeper = keeper

    def advance(self, job: Job) -> Job:
        """From now on, let only the ranks of ``job``, the run's next job, commit checkpoints.

        Return a copy of ``job`` whose ranks may commit checkpoints. For a run without a name, return ``job`` itself.

        Raises:
            OSError: the folder or URL for checkpoints cannot be used.
        """
        if self._keeper is None or job.fence is None:
            return job
        self._keeper.advance(job.attempt)
        return replace(job, fence=replace(job.fence, attempt=job.attempt))

    def settle(self, *, finished: bool) -> None:
        """Release the run's name, if it has one, at the end of the run, so that another run may use the name.

        Args:
            finished: whether the training has ended with success.

        Raises:
            RunCancelledError: the training has ended with success, but another run had taken this run's name. Since
                then, ranks of this run could not commit checkpoints, so this run's last checkpoints may be missing.
        """
        if self._keeper is not None:
            self._keeper.release(finished=finished)


class Keeper:
    """Reads, writes and renews one claim, the record that reserves a name for a run.

    Args:
        place: the folder or URL where the claim is kept.
        job: the job of the run for which the name is reserved.
        times: how often to renew and to check the claim, and when a claim expires.
    """

    def __init__(self, place: Place, job: Job, times: Times) -> None:
        self._place = place
        self._job = job
        self._times = times
        self._claim: Claim | None = None
        self._finished = False
        self._ended = threading.Event()
        self._writing = threading.Lock()

    def read(self) -> Claim | None:
        """Return the claim (the record that reserves the run's name) as it is now; ``None`` if there is no claim."""
        return claims.find(self._place.read)

    def _write(self, claim: Claim) -> None:
        self._place.write(FILES[claim.sequence % 2], seal(claim))
        self._claim = claim

    def take(self, identity: Identity, wanted: Callable[[], bool]) -> Claim:
        """Claim the run's name for this run, and return the new claim, the record that reserves the name.

        If it is not known whether the previous run with this name has ended, wait first. If that run renews its claim
        meanwhile, it has not ended, and the name cannot be claimed. If it does not for ``Times.expire`` seconds, it
        counts as ended.

        Args:
            identity: what the run trains.
            wanted: returns whether the run is still wanted; ``False`` once it is cancelled.

        Raises:
            ConfigurationError: the run cannot continue the earlier training under its name.
            StartError: another run is using this run's name.
            RunCancelledError: the run was cancelled while it waited for the previous run to end.
            OSError: the folder or URL for checkpoints cannot be used.
        """
        here = _here(self._job.run_id)
        found = self._await_end(here, wanted)
        claim = claims.following(found, identity, here)
        if found is not None and claim.training == found.training and (changed := claims.changes(found, identity)):
            told = "this run differs from the last one of its name"
            _log.warning("run %s: %s (run %s) in %s", self._job.label, told, found.run, ", ".join(changed))
        self._write(claim)
        time.sleep(self._times.settle)
        again = self.read()
        if again is None or again.run != here.run:
            raise _held(identity.name, None if again is None else again.holder)
        return claim

    def _await_end(self, here: Holder, wanted: Callable[[], bool]) -> Claim | None:
        """Wait until it is known whether the last run with this run's name has ended.

        Return the last run's claim, the record that reserves the name for it; ``None`` if no run has had this name.

        Raises:
            StartError: the last run has renewed its claim, so it has not ended.
            RunCancelledError: this run was cancelled during the wait.
        """
        first: Claim | None = None
        since = time.monotonic()
        while True:
            now = time.monotonic()
            found = self.read()
            if found is None or found.holder is None or _has_ended(found.holder, here):
                return found
            if first is None:
                first = found
                most = self._times.expire
                told = "holds the name: waiting to see whether it has ended, for at most"
                _log.warning("run %s: %s %s %g s", self._job.label, found.holder, told, most)
            elif found.sequence != first.sequence:
                assert self._job.identity is not None
                raise _held(self._job.identity.name, found.holder)
            elif now - since > self._times.expire:
                return found
            if not wanted():
                raise RunCancelledError(
                    f"run {self._job.run_id} was cancelled while it waited for another run of the same name to end"
                )
            time.sleep(self._times.look)

    def renew_until_end(self, lost: Callable[[str], object]) -> None:
        """Renew the claim (the record that reserves the run's name) until :meth:`release` is called.

        If another run has taken the run's name, or if the claim is gone, call ``lost`` with a sentence about this, and
        return.
        """
        warned = False
        while not self._ended.wait(self._times.renew):
            try:
                with self._writing:
                    if self._ended.is_set():
                        return
                    if (other := self._other()) is not None:
                        lost(other)
                        return
                    assert self._claim is not None
                    self._write(self._claim.renewed())
                warned = False
            except OSError as error:
                if not warned:
                    _log.warning("run %s: cannot renew the claim to its name: %s", self._job.label, error)
                warned = True

    def advance(self, attempt: int) -> None:
        """Record in the claim to the run's name that the run has begun another job, whose first attempt is ``attempt``.

        The claim is the record that reserves the run's name. Ranks of the run's earlier jobs read in the claim that
        they may not commit checkpoints any more; see :meth:`Tenure.advance`.
        """
        with self._writing:
            if self._claim is not None and self._other() is None:  # otherwise the run ends
                self._write(self._claim.advanced(attempt))

    def _other(self) -> str | None:
        """If this run has lost its name, return a text that says who holds the name now; otherwise, return ``None``."""
        found = self.read()
        if found is not None and found.run == self._job.run_id:
            return None
        holder = "no run" if found is None else str(found.holder or f"run {found.run}")
        return f"{holder} holds its name now"

    def release(self, *, finished: bool) -> None:
        """Release the run's name, so that another run may use it; see :meth:`Tenure.settle`.

        Stop renewing the claim (the record that reserves the name), and mark it as free: no run uses the name.
        """
        self._ended.set()
        with self._writing:
            if self._claim is None or self._claim.holder is None:
                return
            self._finished = self._finished or finished
            try:
                other = self._other()
                if other is None:
                    self._write(self._claim.released(finished=self._finished))
            except OSError as error:
                told = (
                    "cannot release its name, so the next run of this name must wait, and then continues this training"
                )
                _log.warning("run %s: %s: %s", self._job.label, told, error)
                return
        if other is not None and finished:
            raise RunCancelledError(f"run {self._job.run_id} was cancelled: {other}")


@contextmanager
def hold(
    job: Job, wanted: Callable[[], bool], lost: Callable[[str], object], times: Times | None = None
) -> Iterator[Tenure]:
    """Reserve a run's name for the run during the ``with`` block. Do nothing for a run without a name.

    Args:
        job: the run's job, which contains the name.
        wanted: returns whether the run is still wanted; ``False`` once it is cancelled.
        lost: called in a separate thread, with a sentence that says why, if the run loses its name: because another run
            takes the name, or because the claim is gone.
        times: how often to renew and to check the claim (the record that reserves the name), and when it expires.

    Raises:
        ConfigurationError, RunCancelledError: as for :meth:`Keeper.take`.
        StartError: another run is using the run's name, or the folder or URL for checkpoints cannot be used.
    """
    if job.identity is None or job.checkpoints is None:
        yield Tenure(job)
        return
    where = claims.folder_of(job.checkpoints.dir, job.identity.name)
    try:
        keeper = Keeper(open_place(where, job.run_id), job, Times() if times is None else times)
        claim = keeper.take(job.identity, wanted)
    except OSError as error:
        raise StartError(f"checkpoints {job.checkpoints.dir!r} cannot be used by the driver: {error}") from None
    folder = claims.training_folder(where, claim.training)
    checkpoints = replace(job.checkpoints, dir=folder)
    thread = threading.Thread(target=keeper.renew_until_end, args=(lost,), name="distributor-claim", daemon=True)
    thread.start()
    try:
        yield Tenure(replace(job, checkpoints=checkpoints, fence=Fence(where, job.run_id)), keeper)
    finally:
        with suppress(RunCancelledError):
            keeper.release(finished=False)
        thread.join()


def _here(run: str) -> Holder:
    pid = os.getpid()
    return Holder(run, socket.gethostname(), processes.pid_scope(), pid, processes.start_time(pid) or "")


def _has_ended(holder: Holder, here: Holder) -> bool:
    """Return whether the driver of a run that holds a name is known to have ended. Only the driver's machine knows."""
    same = holder.machine == here.machine and bool(here.machine and holder.started)
    return same and processes.has_ended(holder.pid, holder.started)


def _held(name: str, holder: Holder | None) -> StartError:
    return StartError(
        f"the name {name!r} is held by {holder or 'another run'}: wait until that run has ended, cancel it, or pass "
        "another name"
    )
