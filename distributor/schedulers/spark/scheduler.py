"""The Spark scheduler: one barrier-mode job, from an RDD on classic sessions, ``mapInArrow`` on Connect."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from distributor.channel import task as exchange
from distributor.channel.server import ChannelServer
from distributor.errors import ConfigurationError, DistributorError, ResourceError, RunCancelledError, StartError
from distributor.machine import network
from distributor.outcomes import verdict
from distributor.outcomes.failures import describe, order_failures
from distributor.schedulers.spark import errors as spark_errors, preflight, slots as spark_slots
from distributor.schedulers.spark.progress import Progress
from distributor.schedulers.spark.rows import FailedRows, sort
from distributor.schedulers.spark.session import (
    conf,
    context_for_tasks,
    is_cluster,
    is_connect,
    is_true,
    master_of,
    set_connect_python,
    without_bar,
)
from distributor.schedulers.spark.shipment import Shipment
from distributor.schedulers.spark.task import run_task
from distributor.shipping import package as shipping
from distributor.text import notices
from distributor.text.wording import count, size
from distributor.values.job import Job, Resources, Step, TaskProfile, warmth
from distributor.values.outcome import Collected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_log = notices.logger

Task = Callable[..., Iterator[bytes]]


#: Bytes of one piece of a return value. By default, Spark Connect sends rows in messages of at most 4 MiB.
_CHUNK_CLASSIC = 8 << 20
_CHUNK_CONNECT = 1 << 20

#: Least number of seconds before tasks can begin without the driver: Spark's allGather sleeps for one between polls.
_EARLIEST = exchange.CONNECT_TIMEOUT + 1.0

#: How many times a run is submitted to Spark if Spark loses its tasks before they begin.
_ATTEMPTS = 3

#: Number of seconds between checks of the cluster's slots while they are too few.
_SLOT_POLL = 0.5

#: Number of seconds beyond the grace period in which all tasks of a failed run end. After that, its handle cancels it.
_FAILED_MARGIN = 5.0

#: Most tasks of a failed stage that are examined, and milliseconds that Spark gets to record their ends.
_MOST_TASKS = 1000
_LISTENERS_MS = 2000

#: Most bytes of a function or a project folder that travels within a query of Spark Connect.
_INLINE = 1 << 20

#: Names of the files that each session of Spark Connect has already uploaded.
_uploaded: WeakKeyDictionary[SparkSession, set[str]] = WeakKeyDictionary()

#: Settings that request encryption or authentication of network traffic. They do not apply to torch's traffic.
_ENCRYPTION = ("spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled", "spark.authenticate")


class SparkScheduler:
    """A scheduler that runs a job as barrier tasks of a session.

    Args:
        session: an active session, classic or Connect.
    """

    #: Ranks run on executors, which have their own files.
    on_driver = False

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._connect = is_connect(session)
        self._cluster = spark_slots.cluster_of(session)
        self._slots: spark_slots.Slots | None = None
        self._tag = ""
        self._cancelled = threading.Event()
        self._server: ChannelServer | None = None
        self._held_up: Step | None = None  # before there is a Spark job
        self._needed = 0
        self._query: Progress | None = None

    def check(self, job: Job) -> None:
        """Find every problem that can be known before anything starts.

        Raises:
            ConfigurationError: a setting of the session rules out barrier mode; or one requests encryption, traffic
                between ranks is not encrypted, and no other setting accepts that.
            ResourceError: the job needs more slots than the cluster can ever have, or GPUs from a local master.
        """
        self._check_encryption(job)
        if is_cluster(self._session) and is_true(conf(self._session, "spark.dynamicAllocation.enabled")):
            raise ConfigurationError(
                "spark.dynamicAllocation.enabled is true: Spark's barrier mode does not run with it (SPARK-24942) but "
                "on local[...] masters; set it to false and spark.executor.instances to the executors to train on"
            )
        if job.use_gpu and not is_cluster(self._session):
            raise preflight.no_executors(master_of(self._session))
        self._needed = job.num_tasks
        self._slots = slots = spark_slots.Slots(self._session, self._cluster, job)
        most = slots.most()
        if most is not None and job.num_tasks > most:
            raise ResourceError(slots.too_few(most))

    def shape(self, resources: Resources) -> tuple[int, TaskProfile | None]:
        """Return how many ranks each task hosts, and a task profile if the session's settings do not fit.

        Raises:
            ConfigurationError, ResourceError: as for :func:`spark_slots.shape`.
        """
        return spark_slots.shape(resources, self._cluster)

    def node_limit(self, resources: Resources) -> int | None:
        """Return how many ranks one executor may host, ``None`` for any number."""
        return spark_slots.node_limit(resources, self._cluster)

    @property
    def omp_threads(self) -> int | None:
        """The value to which Spark sets OMP_NUM_THREADS for its workers; ``None`` if the user has set it."""
        return None if conf(self._session, "spark.executorEnv.OMP_NUM_THREADS") else self._cluster.task_cpus

    def _encryption(self) -> list[str]:
        """Return the settings of the session that request encryption."""
        return [key for key in _ENCRYPTION if is_true(conf(self._session, key))]

    def _check_encryption(self, job: Job) -> None:
        settings = self._encryption()
        if not settings:
            return
        accept = f"{'deepspeed' if job.launch.name == 'deepspeed' else 'pytorch'}.spark.distributor.ignoreSsl"
        told = (
            f"{' and '.join(settings)} {'is' if len(settings) == 1 else 'are'} true, but ranks do not keep to it. NOT "
            "encrypted: NCCL's and gloo's traffic between ranks (gradients, parameters) and torch's rendezvous store. "
            "Encrypted: log lines and orders between nodes and driver (TLS). What goes through Spark (the function, "
            "results) is as Spark's settings have it; spark.authenticate alone encrypts nothing"
        )
        if not is_true(self._session.conf.get(accept, "false")):
            raise ConfigurationError(f"{told}. To accept that, set {accept} to true in the Spark configuration")
        _log.warning("%s; accepted by %s", told, accept)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        if self._connect:
            return threading.Thread(target=target, name="distributor-run")
        from pyspark import InheritableThread

        # The run's jobs stay in the caller's job group, so that cancelling the group cancels them.
        return InheritableThread(target=target)

    def waiting_for(self) -> Step | None:
        if self._held_up is not None:
            return self._held_up
        if self._connect:
            busy = self._query is not None and self._query.waiting
            return Step("waiting for task slots", ": other jobs hold them") if busy else None
        if self._slots is None:
            return None
        free = self._slots.free()  # read first: tasks of this run may start meanwhile
        stages = self._stages()
        if stages and self._tasks_started(stages):
            return None
        if free < self._needed:
            return self._held_by_others(free)
        return Step(
            f"waiting for Spark to start {count(self._needed, 'task')}" if stages else "sending the job to Spark"
        )

    def cancel(self) -> None:
        self._cancelled.set()
        if not self._tag:
            return
        if self._connect:
            self._session.interruptTag(self._tag)
        else:
            self._session.sparkContext.cancelJobsWithTag(self._tag)

    def run(self, job: Job, server: ChannelServer) -> Collected:
        try:
            return self._run(job, server)
        except DistributorError:
            raise
        except Exception as error:
            raise spark_errors.translate(error, job, self._failed_hosts()) from None

    def _run(self, job: Job, server: ChannelServer) -> Collected:
        self._server = server
        self._await_slots(job)
        host, bind = self._driver_address()
        try:
            at = server.listen(bind, host, job.driver_ports)
            endpoint = (at.host, at.port, at.certificate, at.token)
        except OSError as error:
            where = f"{bind}, ports {job.driver_ports[0]}-{job.driver_ports[1]}" if job.driver_ports else bind
            _log.warning("cannot listen on %s (%s): the run has no live log lines", where, error)
            endpoint = None
        package: bytes | str = shipping.package_zip()
        parts: dict[str, bytes] = {}
        if self._connect:
            package = self._upload(shipping.package_zip())
            job, parts = shipping.detach(job, _INLINE)
        shipment: Shipment = {
            "run_id": job.run_id,
            "job": pickle.dumps(job),
            "parts": {part: self._upload(content) for part, content in parts.items()},
            "package": package,
            "endpoint": endpoint,
            # On Connect, mapInArrow takes a second anyway, and the client is seldom reachable.
            "exchange": not self._connect,
            "silence": job.heartbeat_timeout,
            "warmth": warmth(job),
            "driver_host": host,
            "gpu": spark_slots.GPU if job.use_gpu else None,
            "chunk": _CHUNK_CONNECT if self._connect else _CHUNK_CLASSIC,
            "patience": job.grace_period + _FAILED_MARGIN,
            # A report has tracebacks and log lines: where encryption is requested, it must not travel unencrypted.
            "key": None if self._encryption() else secrets.token_bytes(32),
        }
        self._tag = f"distributor-{job.run_id}"
        task = _make_task(shipment)
        server.accept_if(partial(spark_slots.is_spread, job))
        if self._connect:
            return sort(self._collect_connect(job, task))
        return replace(self._collect_once_begun(job, task, server), times=self._times())

    def _collect_once_begun(self, job: Job, task: Task, server: ChannelServer) -> Collected:
        """Run the Spark job. Repeat it while it ends before any task has begun, for a reason that may pass.

        Raises:
            StartError: Spark kept placing too many ranks on an executor until the run's start timeout.
            RunCancelledError: the run was cancelled meanwhile.
        """
        deadline = time.monotonic() + job.start_timeout
        lost = refused = 0
        while True:
            submitted = time.monotonic()
            try:
                collected = sort(self._collect_classic(job, task))
            except Exception as error:
                # Spark gives up a barrier job with the first task it loses, for example because it gave the task a
                # worker that was about to end with the previous job. If no task can have begun, starting again is safe.
                waiting = not server.begun and (server.reached or self._ran(time.monotonic() - submitted) < _EARLIEST)
                harmless = waiting and lost + 1 < _ATTEMPTS and not self._cancelled.is_set()
                if not (harmless and spark_errors.is_lost_worker(error)):
                    raise
                lost += 1
                server.start_again()
                _log.warning("starting run %s again: %s", job.run_id, spark_errors.reason(str(error)))
                continue
            if not server.start_again():
                return collected
            refused += 1
            told = f"Spark put more ranks on an executor than the {job.max_processes_per_node} that it may have"
            if time.monotonic() > deadline:
                raise StartError(
                    f"the run did not start within start_timeout={job.start_timeout:g} s: {told}, {refused} times. "
                    "Other jobs may hold slots elsewhere; executors of one size (spark.executor.cores) make it easier"
                )
            if refused == 1:
                _log.warning("%s; run %s is placed again", told, job.run_id)
            if self._cancelled.wait(_SLOT_POLL):
                raise RunCancelledError(f"run {job.run_id} was cancelled while it waited for slots")
            self._await_slots(job)

    def _collect_classic(self, job: Job, task: Task) -> Iterable[bytes]:
        from pyspark import accumulators

        context = context_for_tasks(self._session)
        failed = FailedRows(job.num_tasks - 1, self._fail_job)
        # SparkContext.accumulator assigns numbers without a lock, and two runs with the same number would mix.
        accumulator: Any = accumulators.Accumulator(cast(Any, self._tag), (), cast(Any, failed))
        failed_rows = accumulator if job.num_tasks > 1 else None
        for tag in (self._tag, *_session_tags(self._session)):  # tags belong to this thread, which ends with the run
            context.addJobTag(tag)
        context.setJobDescription(f"distributor {job.label}: {job.title} on {count(job.num_processes, 'rank')}")
        try:
            tasks = context.parallelize(range(job.num_tasks), job.num_tasks).barrier()
            work = tasks.mapPartitions(lambda _rows: task(failed_rows))
            if job.task_profile is not None:
                work = work.withResources(spark_slots.profile(self._session, job.task_profile))
            with without_bar(self._session):
                rows = work.collect()
            return [*rows, *(row for row in failed.rows if row not in rows)]
        except Exception:
            if failed.complete:
                return failed.rows
            raise
        finally:
            accumulators._accumulatorRegistry.pop(accumulator.aid, None)

    def _fail_job(self, rows: Sequence[bytes]) -> None:
        """Cancel the job, so that Spark shows it as failed and why."""
        scala = self._session.sparkContext._jsc.sc()
        stopped_for = "" if self._server is None else self._server.stop_reason
        reason = f"by distributor: {_why(sort(rows), stopped_for)}"
        with suppress(Exception):  # if nothing cancels the job, the holder gives up in time
            try:
                scala.cancelJobsWithTag(self._tag, reason)
            except Exception:  # Spark 3.5 has no parameter for the reason
                scala.cancelJobsWithTag(self._tag)

    def _collect_connect(self, job: Job, task: Task) -> Iterable[bytes]:
        def in_arrow(batches: Iterable[Any]) -> Iterator[Any]:
            import pyarrow as pa

            for _ in batches:
                pass
            for piece in task():
                yield pa.RecordBatch.from_arrays([pa.array([piece], pa.binary())], ["piece"])

        session: Any = self._session
        query = Progress(job.num_tasks)
        session.addTag(self._tag)
        try:
            if hasattr(session, "registerProgressHandler"):
                session.registerProgressHandler(query)
                self._query = query
            set_connect_python(self._session)
            rows = self._session.range(0, job.num_tasks, 1, job.num_tasks)
            options: dict[str, Any] = {}
            if job.task_profile is not None:
                options["profile"] = spark_slots.profile(self._session, job.task_profile)
            result = rows.mapInArrow(in_arrow, "piece binary", barrier=True, **options)
            if hasattr(result, "toArrow"):
                return [piece.as_buffer().to_pybytes() for piece in result.toArrow().column("piece")]
            return [bytes(row[0]) for row in result.collect()]
        finally:
            with suppress(Exception):  # the user may have cleared all tags and handlers
                session.removeTag(self._tag)
                if self._query is not None:
                    session.removeProgressHandler(query)

    def _upload(self, content: bytes) -> str:
        """Make Spark Connect deliver a file to the executors, once per session. Return its name there.

        Large content within a query would be held several times in the heaps of the server and the executors.
        """
        name = f"distributor-{hashlib.sha256(content).hexdigest()[:32]}"
        uploaded = _uploaded.setdefault(self._session, set())
        if name not in uploaded:
            self._held_up = Step(f"sending {size(len(content))} to the Spark Connect server")
            with tempfile.TemporaryDirectory(prefix="distributor-") as folder:
                path = os.path.join(folder, name)
                with open(path, "wb") as file:
                    file.write(content)
                cast(Any, self._session).addArtifacts(path, file=True)
            self._held_up = None
            uploaded.add(name)
        return name

    def _driver_address(self) -> tuple[str, str]:
        """Return the driver's address for nodes to use, and the address to bind."""
        if not self._connect:
            host = str(conf(self._session, "spark.driver.host") or "127.0.0.1").strip("[]")
            return host, str(conf(self._session, "spark.driver.bindAddress") or host).strip("[]")
        host = network.address_towards(str(cast(Any, self._session).client.host).strip("[]")) or "127.0.0.1"
        if network.is_loopback(host):  # the server is on this machine: other executors know it by another address
            of_server = network.resolve(str(conf(self._session, "spark.driver.host", host)).strip("[]"))
            host = of_server if network.is_own(of_server) else host
        return host, host

    def _await_slots(self, job: Job) -> None:
        """Wait for executors to come up, and for free slots if the ranks per node are limited.

        The run's start timeout cancels the wait.

        Raises:
            RunCancelledError: the run was cancelled meanwhile.
        """
        if self._connect:  # Connect does not report slots
            return
        assert self._slots is not None
        while not self._slots.ready():
            total, free = self._slots.total(), self._slots.free()
            few = Step("waiting for executors", f": {self._slots.too_few(total)}")
            self._held_up = few if total < self._needed else self._held_by_others(free)
            if self._cancelled.wait(_SLOT_POLL):
                raise RunCancelledError(f"run {job.run_id} was cancelled while it waited for slots")
        self._held_up = None

    def _held_by_others(self, free: int) -> Step:
        there = f"{free or 'none'} {'is' if free < 2 else 'are'} free"
        why = ", other jobs hold the rest" if free < self._needed else ""
        return Step(f"waiting for {count(self._needed, 'task slot')}", f": {there}{why}")

    def _tasks_started(self, stages: Sequence[Any]) -> bool:
        """Return whether Spark has started tasks of this run in its last attempt."""
        last = max(stages, key=lambda stage: int(stage.stageId()))
        if last.numActiveTasks() + last.numCompletedTasks() + last.numFailedTasks() > 0:
            return True
        # The status of stages may be seconds old. Spark's scheduler is up to date, but only while a stage runs.
        scheduler = self._session.sparkContext._jsc.sc().taskScheduler()
        tasks = scheduler.taskSetManagerForAttempt(last.stageId(), last.currentAttemptId())
        return bool(tasks.isDefined() and tasks.get().runningTasks() > 0)

    def _failed_hosts(self) -> list[str]:
        """Return the hosts where tasks of this run have failed, as far as Spark knows."""
        return sorted({str(task.host()) for task in self._failed_tasks()})

    def _ran(self, at_most: float) -> float:
        """Return the duration in seconds of the longest failed task; ``at_most`` if Spark does not know."""
        with suppress(Exception):
            return float(max(task.duration().get() for task in self._failed_tasks())) / 1000
        return at_most

    def _failed_tasks(self) -> list[Any]:
        """Return Spark's records of the failed tasks of this run, as far as it has any."""
        failed = []
        with suppress(Exception):  # on Connect, or if the context has just stopped
            scala = self._session.sparkContext._jsc.sc()
            scala.listenerBus().waitUntilEmpty(_LISTENERS_MS)  # the status store lags a little
            store = scala.statusStore()
            for stage in self._stages():
                tasks = store.taskList(stage.stageId(), stage.currentAttemptId(), _MOST_TASKS)
                every = (tasks.apply(index) for index in range(tasks.size()))
                failed += [task for task in every if task.status() == "FAILED"]
        return failed

    def _times(self) -> dict[str, float]:
        """Return when Spark submitted the stage, in seconds since the epoch, if it still knows."""
        with suppress(Exception):
            return {"stage": max(stage.submissionTime() for stage in self._stages()) / 1000}
        return {}

    def _stages(self) -> list[Any]:
        """Return Spark's records of the run's stages."""
        tracker = self._session.sparkContext._jsc.sc().statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(self._tag)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job.isDefined() for stage in job.get().stageIds()]
        return [stage.get() for stage in stages if stage.isDefined()]


def _session_tags(session: SparkSession) -> list[str]:
    """Return the tag by which ``spark.interruptAll()`` finds a classic session's jobs. Spark 3.5 has no such tag."""
    try:
        return [str(cast(Any, session)._jsparkSession.sessionJobTag())]
    except Exception:
        return []


@cache
def _portable_task() -> bytes:
    """Pickle ``run_task`` by value with all that it uses of this package, which workers need not have installed."""
    import pyspark.cloudpickle as spark_cloudpickle

    import distributor

    spark_cloudpickle.register_pickle_by_value(distributor)
    try:
        pickled: bytes = spark_cloudpickle.dumps(run_task)
        return pickled
    finally:
        spark_cloudpickle.unregister_pickle_by_value(distributor)


def _make_task(shipment: Shipment) -> Task:
    """Make the function that Spark pickles: nested, so that it travels by value, with the standard library only."""
    pickled = _portable_task()

    def task(failed_rows: Any = None) -> Iterator[bytes]:
        import pickle

        pieces: Iterator[bytes] = pickle.loads(pickled)(shipment, failed_rows)
        return pieces

    return task


def _why(collected: Collected, stopped_for: str) -> str:
    """Return in one line why a run failed; ``stopped_for`` if no report says more."""
    failures = [o.failure for report in collected.reports for o in report.outcomes if o.state == "failed" and o.failure]
    errors = [report.error[1] for report in collected.reports if report.error is not None]
    if errors:
        text = errors[0]
    elif failures:
        text = describe(order_failures(failures))
    elif collected.lost_hosts:
        text = str(verdict.node_lost(collected.lost_hosts))
    else:
        text = f"the ranks were stopped: {stopped_for or 'the run was cancelled, or a node was lost'}"
    return text.partition("\n")[0]
