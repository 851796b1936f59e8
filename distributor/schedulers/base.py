"""The interface of schedulers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from distributor.channel.server import ChannelServer
from distributor.values.job import Job, StatusDetail, TaskProfile
from distributor.values.options import Resources
from distributor.values.outcome import Collected


class Scheduler(Protocol):
    """Runs one job, on this machine or on a cluster.

    ``shape``, ``node_limit`` and ``omp_threads`` serve to build the job. Then come ``check`` and, once, ``run``, in the
    thread that ``thread`` makes. After ``check``, any thread may call ``waiting_for``, ``room``, ``slots_may_come``,
    ``leaving`` and ``cancel``. While Spark's context stops, ``waiting_for``, ``room`` and ``leaving`` may raise any
    exception.

    ``shape``, ``node_limit`` and ``check`` raise ConfigurationError if settings are wrong or contradict the request,
    and ResourceError if more is requested than there is.
    """

    @property
    def on_driver(self) -> bool:
        """Whether ranks run on the driver's machine and use its files; ``False`` for Spark, even for ``local[...]``."""

    @property
    def omp_threads(self) -> int | None:
        """The OMP_NUM_THREADS that Spark sets in its workers; ``None`` if it does not set the variable."""

    def shape(self, resources: Resources) -> tuple[int, TaskProfile | None]:
        """Return ranks per task, and its CPUs and GPUs to request; ``None`` if the session's settings suffice."""

    def node_limit(self, resources: Resources) -> int | None:
        """Return how many ranks one node may host; ``None`` for any number."""

    def check(self, job: Job) -> None:
        """Check the job for every problem that can be known before anything starts."""

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a new thread for ``target``, which calls :meth:`run`. The caller starts it."""

    def run(self, job: Job, server: ChannelServer) -> Collected:
        """Run a job that has passed ``check`` to its end. Failures of ranks are returned as data, not raised.

        The server is made to listen for nodes, or gets sockets that are connected to them. Only a classic Spark session
        heeds ``job.avoided``. Raises StartError, RunCancelledError, NodeLostError, ResourceError or ResultError.
        """

    def cancel(self) -> bool:
        """End the run by force, even on nodes that have received no order to stop. Do nothing if the run has ended.

        It is called again until the run has ended: Spark may not know the job yet. Return ``True`` if it should be
        soon, because killing tasks now could also end their executors (Spark). On Spark, an agent whose task was killed
        still gives its ranks the grace period.
        """

    def room(self, job: Job) -> int | None:
        """Return how many ranks the free task slots can host now; ``None`` if it is not known.

        Slots of the job itself are not free. On Spark Connect, which does not report slots, all count as free until the
        job is submitted, and none afterwards. Raises RunCancelledError or StartError if the session has ended.
        """

    @property
    def reports_slots(self) -> bool:
        """Whether :meth:`room` counts what other runs and jobs hold."""

    @property
    def slots_may_come(self) -> bool:
        """Whether :meth:`room` may soon return more, as while executors come up."""

    def leaving(self) -> str | None:
        """Return the host of a node whose executor Spark is decommissioning, if one is known."""

    def again(self, job: Job) -> Scheduler:
        """Return a scheduler, which needs no ``check``, for the run's next job. This one's must not be running."""

    def waiting_for(self) -> StatusDetail | None:
        """Return what the nodes wait for before they can start; ``None`` if tasks run or nothing is known."""
