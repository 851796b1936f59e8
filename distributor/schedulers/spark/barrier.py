"""What differs between classic and Connect sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from distributor.channel.server import ChannelServer
from distributor.errors import DistributorError, RunCancelledError
from distributor.schedulers.spark.rows import Task
from distributor.values.job import Job, StatusDetail
from distributor.values.outcome import Collected


@dataclass(frozen=True)
class Delivery:
    """How a session sends a job to its tasks."""

    job: Job  # without ``call`` and ``parts``
    call: Any  # a large pickled call: the name of a file that Spark delivers, or a broadcast; None if there is none
    parts: Mapping[str, str]  # names of large parts, and of the files in which Spark delivers them
    package: bytes | str  # this package as a zip, or the name of a file that Spark delivers
    exchange: bool  # of facts: through the driver if it can be reached; otherwise with allGather
    chunk: int  # bytes of a piece of a return value
    in_place: bool = False  # tasks run in the driver's current directory


class BarrierSession(Protocol):
    """A Spark session that runs the barrier tasks of one run.

    The scheduler calls ``await_slots``, ``driver_address``, ``deliver`` and ``collect`` in this order, in the thread
    that ``thread`` makes. Any thread may call the others at any time.
    """

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a new thread for ``target``, which runs the job. The caller starts it."""

    def await_slots(self, job: Job) -> None:
        """Wait until the job can be submitted, as far as slots are reported. RunCancelledError: cancelled meanwhile."""

    def driver_address(self) -> tuple[str, str]:
        """Return the address at which nodes reach the driver, and the address at which it listens."""

    def deliver(self, job: Job) -> Delivery:
        """Decide how the job is sent to its tasks, and upload what is not sent with them."""

    def collect(self, job: Job, task: Task, server: ChannelServer) -> Collected:
        """Run the barrier tasks and return their results. The caller translates Spark's own exceptions.

        StartError: Spark did not place the tasks as requested within the start timeout. RunCancelledError: cancelled
        before tasks were submitted again. ResultError: a return value was lost or changed on its way.
        """

    def waiting_for(self, job: Job) -> StatusDetail | None:
        """Return what the run's tasks wait for; ``None`` if they run or nothing is known."""

    def room(self, job: Job) -> int | None:
        """Return how many slots are free for tasks of a job; ``None`` if this is not known."""

    @property
    def slots_may_come(self) -> bool:
        """Whether :meth:`room` may soon return a larger number."""

    def leaving(self) -> str | None:
        """Return the host of an executor that runs tasks of the run and is being decommissioned, if any."""

    def cancel(self) -> bool:
        """End the wait for slots, and cancel the Spark job.

        Return ``True`` if the job goes on, because tasks may be in ``allGather`` (:mod:`gathering`): call again.
        Meanwhile, the driver tells tasks that connect to end.
        """

    def ended(self, job: Job) -> DistributorError | None:
        """Return the error for the run if the session has ended, otherwise ``None``."""

    def failures(self) -> Mapping[str, str]:
        """Return the known hosts where tasks of this run have failed, and what Spark says of them."""


def pause(cancelled: threading.Event, seconds: float, job: Job) -> None:
    """Wait before a job that may find no free slots yet. RunCancelledError: ``cancelled`` is set."""
    if cancelled.wait(seconds):
        raise RunCancelledError(f"run {job.label} was cancelled while it waited for slots")
