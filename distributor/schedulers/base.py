"""The interface through which other code uses a scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from distributor.channel.server import ChannelServer
from distributor.values.job import Job, Step, TaskProfile
from distributor.values.options import Resources
from distributor.values.outcome import Collected


class Scheduler(Protocol):
    """Runs one job, on this machine or on a cluster.

    Call ``shape``, ``node_limit`` and ``omp_threads`` to build the job, then ``check``. Then call ``run`` once, in the
    thread that ``thread`` makes. Once ``check`` has been called, any thread may call ``waiting_for`` and ``cancel``.
    """

    @property
    def on_driver(self) -> bool:
        """Whether ranks run on the driver's machine, with its files."""

    @property
    def omp_threads(self) -> int | None:
        """The value to which the scheduler itself sets OMP_NUM_THREADS in its tasks; ``None`` if it does not."""

    def shape(self, resources: Resources) -> tuple[int, TaskProfile | None]:
        """Return how many ranks each task hosts, and the resources of each task if they differ from the default.

        Raises:
            ConfigurationError: the request contradicts the settings of the cluster.
            ResourceError: more is requested than the cluster has.
        """

    def node_limit(self, resources: Resources) -> int | None:
        """Return how many ranks one node may host; ``None`` for any number.

        Raises:
            ConfigurationError: the settings do not say how much memory a node has, and the request depends on it.
            ResourceError: a node has too little memory for even one rank.
        """

    def check(self, job: Job) -> None:
        """Find every problem that can be known before anything starts.

        Raises:
            ConfigurationError: the cluster cannot run the job as it is configured.
            ResourceError: the job needs more than the cluster can ever have.
        """

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Make a thread that may call ``run``. The caller starts it."""

    def run(self, job: Job, server: ChannelServer) -> Collected:
        """Run a job to its end, and block until then. Failures of ranks are returned as data, not raised.

        Args:
            job: a job that has passed ``check``. A scheduler that chooses hosts does not use those in ``job.avoided``
                if other hosts have room.
            server: the run's channel. The scheduler makes it listen for nodes, or attaches nodes to it.

        Raises:
            StartError: the ranks could not be started.
            RunCancelledError: the run was cancelled, by ``cancel`` or by other means.
            NodeLostError: a node was lost, and its results with it.
            ResourceError: the resources turned out to be too few.
            ResultError: the values are too large to be brought back.
        """

    def cancel(self) -> bool:
        """End the run by force, even on nodes that the order to stop has not reached. Do nothing if the run has ended.

        Local ranks get no grace period. On Spark, an agent whose task has ended still gives its ranks the grace period.

        Returns:
            ``True`` if nothing was ended, because force would do harm at this moment: on Spark, it could end
            executors. The caller must then call again. Otherwise ``False``.
        """

    def room(self, job: Job) -> int | None:
        """Return how many ranks of a job the free slots can host now; ``None`` if it is not known.

        Slots that the job itself occupies are not free. Spark may raise any exception while its context stops.

        Raises:
            RunCancelledError, NodeLostError: the session in which the job would run has ended.
        """

    @property
    def slots_may_come(self) -> bool:
        """Whether ``room`` may soon return more."""

    def leaving(self) -> str | None:
        """Return the host of a node that the cluster is about to end; ``None`` if no such node is known.

        Spark may raise any exception while its context stops.
        """

    def again(self, job: Job) -> Scheduler:
        """Return a scheduler for another job of a run, after its previous job has ended. The job counts as checked."""

    def waiting_for(self) -> Step | None:
        """Return what the run's nodes wait for before they can start; ``None`` if tasks run or it is not known.

        Spark may raise any exception while its context stops.
        """
