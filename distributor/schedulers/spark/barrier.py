"""The interface of Spark sessions that run barrier tasks. It covers all that differs between classic and Connect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from distributor.channel.server import ChannelServer
from distributor.errors import DistributorError, RunCancelledError
from distributor.schedulers.spark.rows import Task
from distributor.values.job import Job, Step
from distributor.values.outcome import Collected


@dataclass(frozen=True)
class Delivery:
    """The form in which a session sends a job to tasks. The tasks' input, a :class:`Shipment`, contains these values.

    Attributes:
        job: the job, without its large parts if they are sent separately.
        parts: the large parts of the job that Spark delivers as separate files. The keys are the names of the parts,
            and the values are the names of their files.
        package: the library itself (``distributor``) as a zip, or the zip's file name if Spark delivers it separately.
        exchange: whether tasks exchange their facts (address, GPUs, ...) through the driver, if they can reach it.
            Otherwise, they use Spark's ``allGather``.
        chunk: size of one piece of a return value, in bytes.
        in_place: whether tasks run in the driver's own current directory.
    """

    job: Job
    parts: Mapping[str, str]
    package: bytes | str
    exchange: bool
    chunk: int
    in_place: bool = False


class BarrierSession(Protocol):
    """A Spark session, classic or Connect, that runs the barrier tasks of one run.

    The scheduler calls ``await_slots``, ``driver_address``, ``deliver`` and ``collect`` in this order, in the thread
    that ``thread`` makes. Any thread may call ``waiting_for``, ``room``, ``slots_may_come``, ``leaving`` and ``cancel``
    at any time.
    """

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a new thread for ``target``, the function that runs the job. The caller starts the thread."""

    def await_slots(self, job: Job) -> None:
        """Wait until the job can be submitted, if the session reports how many task slots there are.

        Raises:
            RunCancelledError: the run was cancelled during the wait.
        """

    def driver_address(self) -> tuple[str, str]:
        """Return the address at which nodes reach the driver, and the address at which the driver listens."""

    def deliver(self, job: Job) -> Delivery:
        """Decide how the job is sent to its tasks, and upload the parts that are not sent with the tasks themselves."""

    def collect(self, job: Job, task: Task, server: ChannelServer) -> Collected:
        """Run the barrier tasks and return their results.

        Args:
            job: the whole job, which says how many tasks to run and what each needs.
            task: the function that each task runs.
            server: the driver's end of the connections to nodes. It records whether tasks have begun.

        Raises:
            StartError: Spark did not place the tasks as requested within the run's start timeout.
            RunCancelledError: the run was cancelled before the session could submit lost or misplaced tasks again.
            ResultError: a return value was lost or changed on its way to the driver.
            Exception: Spark's own exception, which the caller translates.
        """

    def waiting_for(self, job: Job) -> Step | None:
        """Return what the run's tasks wait for; ``None`` if the tasks run or nothing is known."""

    def room(self, job: Job) -> int | None:
        """Return how many free slots there are for more tasks of a job; ``None`` if this number is not known."""

    @property
    def slots_may_come(self) -> bool:
        """Whether :meth:`room` may soon return a larger number, because executors come up one after the other."""

    def leaving(self) -> str | None:
        """Return the host of an executor that runs tasks of the run and is being decommissioned, if there is one."""

    def cancel(self) -> bool:
        """End the wait for slots, and cancel the Spark job if there is one.

        Returns:
            ``True`` if the job has not been cancelled yet, because its tasks may be waiting in ``allGather``, where
            killing a task also ends its executor (Spark 4.3). The caller must then call this method again, until the
            result is ``False``. Meanwhile, the driver tells all tasks that are connected to it, or connect now, to end.
        """

    def ended(self, job: Job) -> DistributorError | None:
        """Return the error for the run if the session has ended; ``None`` if the session can run jobs."""

    def failures(self) -> Mapping[str, str]:
        """Return the hosts where tasks of this run have failed, and what Spark says of them, as far as it is known."""


def pause(cancelled: threading.Event, seconds: float, job: Job) -> None:
    """Wait for a number of seconds before submitting a job that may not find free slots yet.

    Args:
        cancelled: set when the run is cancelled.
        seconds: how long to wait.
        job: the job.

    Raises:
        RunCancelledError: the run was cancelled before or during the wait.
    """
    if cancelled.wait(seconds):
        raise RunCancelledError(f"run {job.run_id} was cancelled while it waited for slots")
