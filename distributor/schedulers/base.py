"""The interface of schedulers, which bring a job to its nodes, through Spark or directly to this machine."""

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
    thread that ``thread`` makes. Once ``check`` has been called, any thread may call ``waiting_for``, ``room``,
    ``slots_may_come``, ``leaving`` and ``cancel``.
    """

    @property
    def on_driver(self) -> bool:
        """Whether the driver itself runs the ranks, on its own machine. If so, they use that machine's files.

        For Spark, the value is ``False``, even if the master is ``local[...]``.
        """

    @property
    def omp_threads(self) -> int | None:
        """The value to which Spark sets OMP_NUM_THREADS in its workers; ``None`` if Spark does not set the variable."""

    def shape(self, resources: Resources) -> tuple[int, TaskProfile | None]:
        """Return how many ranks each task hosts, and the CPUs and GPUs that the job must request for each task.

        The second value, the CPUs and GPUs, is ``None`` if the Spark session's own settings give each task what it
        needs.

        Raises:
            ConfigurationError: the requested resources contradict the settings of the cluster.
            ResourceError: more is requested than the cluster has.
        """

    def node_limit(self, resources: Resources) -> int | None:
        """Return how many ranks one node may host; ``None`` for any number.

        Raises:
            ConfigurationError: the limit depends on the memory of a node, and the settings for this memory
                cannot be parsed.
            ResourceError: a node has too little memory for even one rank.
        """

    def check(self, job: Job) -> None:
        """Check the job for every problem that can be known before anything starts.

        Raises:
            ConfigurationError: the cluster or, in local mode, this machine cannot run the job as it is configured.
            ResourceError: the job needs more than the cluster can ever have.
        """

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a new thread for ``target``, the function that calls :meth:`run`. The caller starts the thread."""

    def run(self, job: Job, server: ChannelServer) -> Collected:
        """Run a job to its end, and block until then. Failures of ranks are returned as data, not raised.

        Args:
            job: a job that has passed ``check``. In a classic Spark session, the scheduler tries not to use the hosts
                in ``job.avoided`` if other hosts have room. Otherwise, ``job.avoided`` has no effect.
            server: the driver's end of the connections to nodes. The scheduler makes it listen for nodes, or passes it
                sockets that are already connected to nodes.

        Raises:
            StartError: the ranks could not be started, or the driver itself failed.
            RunCancelledError: the run was cancelled, by ``cancel`` or by other means.
            NodeLostError: a node and its results were lost.
            ResourceError: the cluster's resources turned out to be too few for the job.
            ResultError: the ranks' return values are too large to be sent to the driver, or one was lost or changed on
                the way.
        """

    def cancel(self) -> bool:
        """End the run by force, even on nodes that have received no order to stop. Do nothing if the run has ended.

        In local mode, ranks get no grace period. On Spark, an agent whose task has been killed still gives its ranks
        the grace period.

        Returns:
            ``True`` if nothing was ended, because killing tasks at this moment could also end their executors (Spark
            only); ``False`` otherwise. If the result is ``True``, the caller must call this method again.
        """

    def room(self, job: Job) -> int | None:
        """Return how many ranks of a job the free task slots can host now; ``None`` if it is not known.

        Task slots that the job itself occupies are not free. Spark Connect does not report which slots are free: there,
        all slots count as free until the job is submitted, and none afterwards. While Spark's context stops, this
        method may raise any exception, so callers must handle any.

        Raises:
            RunCancelledError, StartError: the session in which the job would run has ended.
        """

    @property
    def slots_may_come(self) -> bool:
        """Whether :meth:`room` may soon return a larger number, for example because executors are still coming up."""

    def leaving(self) -> str | None:
        """Return the host of a node whose executor Spark is decommissioning; ``None`` if no such node is known.

        While Spark's context stops, this method may raise any exception, so callers must handle any.
        """

    def again(self, job: Job) -> Scheduler:
        """Return a new scheduler, which needs no ``check``, for a run's next job.

        The job of this scheduler must have ended, or must not have begun.

        Raises:
            ConfigurationError: the Spark session cannot be used any more.
        """

    def waiting_for(self) -> Step | None:
        """Return what the run's nodes wait for before they can start; ``None`` if tasks run or nothing is known.

        While Spark's context stops, this method may raise any exception, so callers must handle any.
        """
