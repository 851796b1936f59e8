"""The Spark scheduler, which runs a job in barrier mode in a Spark session, classic or Connect."""

from __future__ import annotations

import hashlib
import pickle
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distributor.channel.connections import Endpoint
from distributor.channel.server import ChannelServer
from distributor.errors import DistributorError, RunCancelledError
from distributor.machine import limits
from distributor.outcomes import driver_failures
from distributor.schedulers.spark import exceptions as spark_errors, harmful_settings, settings, slots as spark_slots
from distributor.schedulers.spark.barrier import BarrierSession, Delivery
from distributor.schedulers.spark.classic import ClassicSession
from distributor.schedulers.spark.connect import ConnectSession
from distributor.schedulers.spark.harmful_settings import Found
from distributor.schedulers.spark.rows import Task
from distributor.schedulers.spark.sessions import answering, conf, is_connect, users_call
from distributor.schedulers.spark.shipment import Shipment
from distributor.schedulers.spark.task import run_task
from distributor.shipping import pickling
from distributor.text import notices
from distributor.values.job import Job, StatusDetail, TaskProfile, warmth
from distributor.values.options import Resources
from distributor.values.outcome import Collected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_log = notices.logger

_PATIENCE = 10.0  # seconds without news until the driver gives up results after a failure of Spark or an agent

#: Seconds beyond the grace period for which a task of a failed run waits to be killed. Then its report goes through
#: Spark, before the driver cancels the job without it (``Margins.stop``).
_FAILED_MARGIN = 2.0

#: For the registry of modules that PySpark's cloudpickle pickles by value, which all threads share.
_task_lock = threading.Lock()


class SparkScheduler:
    """Runs a job as barrier tasks of an active Spark session. ConfigurationError: it cannot be used."""

    on_driver = False  # even with master local[...], ranks get copies of the script and the project folder

    def __init__(self, session: SparkSession, call: str | None = None) -> None:
        self._session = session
        self._call = users_call() if call is None else call
        with answering():
            self._cluster = spark_slots.cluster_of(session)
        self._barrier: BarrierSession = (
            ConnectSession(session) if is_connect(session) else ClassicSession(session, self._cluster, self._call)
        )
        self._job: Job | None = None  # set by check()
        self._found: list[Found] = []  # set by check(): the settings that may end tasks
        self._ends = False  # whether the run itself, rather than Spark or its UI, has cancelled the job

    @property
    def omp_threads(self) -> int | None:
        with answering():
            return None if conf(self._session, "spark.executorEnv.OMP_NUM_THREADS") else self._cluster.task_cpus

    def shape(self, resources: Resources) -> tuple[int, TaskProfile | None]:
        return spark_slots.shape(resources, self._cluster)

    def node_limit(self, resources: Resources) -> int | None:
        return spark_slots.node_limit(resources, self._cluster)

    def check(self, job: Job) -> None:
        with answering():
            settings.check_encryption(self._session, job)
            settings.check_call(self._session, job)
            self._found = settings.check_hazards(self._session)
            spark_slots.Slots(self._session, self._cluster, job).check()
        self._job = job

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        return self._barrier.thread(target)

    def room(self, job: Job) -> int | None:
        try:
            slots = self._barrier.room(job)
        except Exception:
            if (ended := self._barrier.ended(job)) is not None:
                raise ended from None
            raise
        return None if slots is None else slots * job.ranks_per_task

    @property
    def reports_slots(self) -> bool:
        return not is_connect(self._session)

    @property
    def slots_may_come(self) -> bool:
        return self._barrier.slots_may_come

    def leaving(self) -> str | None:
        return self._barrier.leaving()

    def again(self, job: Job) -> SparkScheduler:
        made = SparkScheduler(self._session, self._call)
        made._job, made._found = job, self._found
        return made

    def waiting_for(self) -> StatusDetail | None:
        return None if self._job is None else self._barrier.waiting_for(self._job)

    def cancel(self) -> bool:
        self._ends = True
        return self._barrier.cancel()

    def run(self, job: Job, server: ChannelServer) -> Collected:
        try:
            collected = self._run(job, server)
            return collected if not collected.lost_hosts else _completed(collected, job, server)
        except DistributorError:
            raise
        except Exception as error:
            ours = self._barrier.ended(job) or self._translated(error, job)
            if isinstance(ours, RunCancelledError) and not self._ends:
                ours = driver_failures.final(ours)  # cancelled in Spark's UI, or by PySpark
            if (returned := server.returned(_patience(ours, job))) is None:
                raise ours from ours.__cause__  # not from Spark's exception, with its Java stack
            why = spark_errors.reason(str(error))
            _log.warning(
                "run %s: Spark failed, but all results have reached the driver. Spark's reason: %s",
                job.label,
                why,
            )
            return returned
        finally:
            server.forget_returned()

    def _translated(self, error: Exception, job: Job) -> DistributorError:
        """Return this package's error for one of Spark's, with what explains the loss of a task."""
        failures = self._barrier.failures()
        explanation = harmful_settings.explain(self._found, "\n".join([str(error), *failures.values()]))
        loss = driver_failures.Loss(spark_errors.said_of_loss(str(error), failures.values()), explanation)
        return driver_failures.explained(spark_errors.translate(error, job, sorted(failures), explanation), loss)

    def _run(self, job: Job, server: ChannelServer) -> Collected:
        self._barrier.await_slots(job)
        host, bind = self._barrier.driver_address()
        endpoint = _listen(job, server, host, bind)
        delivery = self._barrier.deliver(job)
        task = _make_task(_shipment(job, delivery, endpoint, host, server.seal()))
        server.receiver.expect(range(job.world_size if job.collect == "all" else 1))
        return self._barrier.collect(job, task, server)


def _completed(collected: Collected, job: Job, server: ChannelServer) -> Collected:
    """Return the results that nodes sent directly to the driver if all have arrived, otherwise ``collected``."""
    returned = server.returned(_PATIENCE)
    if returned is None:
        return collected
    hosts = ", ".join(collected.lost_hosts)
    _log.warning(
        "run %s: an agent on %s died after training had ended, but all results have reached the driver",
        job.label,
        hosts,
    )
    return replace(returned, logs=collected.logs, times=collected.times, files=collected.files)


def _patience(error: DistributorError, job: Job) -> float:
    """Return for how many seconds to wait for results after an error in Spark; 0 if the job was cancelled."""
    # If a node got SIGTERM, its task may end before its ranks, which then have the grace period.
    return 0.0 if isinstance(error, RunCancelledError) else _PATIENCE + job.deadlines.grace_period


def _listen(job: Job, server: ChannelServer, host: str, bind: str) -> Endpoint | None:
    """Make the driver listen for nodes. Return where they can reach it; ``None`` if it cannot listen."""
    if (warning := limits.driver_sockets(job.num_tasks)) is not None:
        _log.warning("run %s: %s", job.label, warning)
    try:
        at = server.listen(bind, host, job.network.driver_ports)
    except OSError as error:
        where = (
            f"{bind}, ports {job.network.driver_ports[0]}-{job.network.driver_ports[1]}"
            if job.network.driver_ports
            else bind
        )
        _log.warning("cannot listen on %s (%s): the run has no live log lines", where, error)
        return None
    return at.host, at.port, at.certificate, at.token


def _shipment(job: Job, delivery: Delivery, endpoint: Endpoint | None, host: str, seal: bytes) -> Shipment:
    return {
        "job_id": job.job_id,
        "job": pickle.dumps(delivery.job),
        "call": delivery.call,
        "parts": dict(delivery.parts),
        "package": delivery.package,
        "endpoint": endpoint,
        "exchange": delivery.exchange,
        "silence": job.deadlines.heartbeat_timeout,
        "warmth": warmth(job),
        "driver_host": host,
        "gpu": spark_slots.GPU if job.resources.use_gpu else None,
        "most_tasks": None if job.node_limit is None else job.node_limit // job.ranks_per_task,
        "ports": job.launch.ports * job.ranks_per_task,
        "packages": list(job.launch.needs),
        "chunk": delivery.chunk,
        "in_place": delivery.in_place,
        "patience": job.deadlines.grace_period + _FAILED_MARGIN,
        "seal": seal,
    }


@cache
def _portable_task() -> bytes:
    return portable(run_task)


def portable(value: object, own: Iterable[ModuleType] = ()) -> bytes:
    """Pickle a value by value with the code that it uses of this package and of ``own``, which workers may not have.

    PySpark encodes it as text for the JVM, which takes 2 ms for each 100 kB: compress it.
    """
    import pyspark.cloudpickle as spark_cloudpickle

    import distributor

    with pickling.pickled_by_value(spark_cloudpickle, [distributor, *own], _task_lock):
        return zlib.compress(spark_cloudpickle.dumps(value))


def _make_task(shipment: Shipment) -> Task:
    """Make the function that Spark pickles and runs in each task: nested, so that it is pickled by value.

    It imports only the standard library. ``run_task`` is unpickled once in a Python worker, and kept for later tasks.
    """
    packed = _portable_task()
    name = f"_distributor_{hashlib.sha256(packed).hexdigest()[:16]}"

    def task() -> Iterator[bytes]:
        import pickle
        import sys
        import types
        import zlib

        if name not in sys.modules:
            kept: Any = types.ModuleType(name)
            kept.run_task = pickle.loads(zlib.decompress(packed))
            sys.modules[name] = kept
        pieces: Iterator[bytes] = sys.modules[name].run_task(shipment)
        return pieces

    return task
