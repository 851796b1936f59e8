"""One barrier-mode Spark job: an RDD on classic sessions, ``mapInArrow`` on Connect. Alone in importing pyspark."""

from __future__ import annotations

import logging
import pickle
import re
import secrets
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from distributor import network, outcomes, shipping, start
from distributor.channel.frames import Log
from distributor.channel.server import ChannelServer
from distributor.errors import (
    ConfigurationError,
    DistributorError,
    NodeLostError,
    ResourceError,
    ResultError,
    RunCancelledError,
)
from distributor.job import Job
from distributor.outcomes import Collected
from distributor.schedulers.spark_task import Shipment, run_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("distributor")

Task = Callable[..., Iterator[bytes]]

_OUTPUT = struct.Struct("!IBQ")  # rank, stream, offset

_GPU = "gpu"
_GPU_AMOUNT = "spark.task.resource.gpu.amount"

#: Bytes of one piece of a return value. Spark Connect sends rows in messages of 4 MiB at most by default.
_CHUNK_CLASSIC = 8 << 20
_CHUNK_CONNECT = 1 << 20

#: Seconds between looks at the cluster's slots while they are too few.
_SLOT_POLL = 0.5

#: Seconds beyond the grace in which all tasks of a failed run end. A run that takes longer is cancelled by its handle.
_FAILED_MARGIN = 5.0

#: Settings that ask for a network which nobody else can read or write, and that say nothing of torch's part of it.
_ENCRYPTION = ("spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled", "spark.authenticate")


def active_session() -> SparkSession | None:
    """The session that is active in this process, classic or Connect; never creates one."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None and is_connect(active):
        return active
    # The active session is a matter of the thread; the default one is of the process.
    classic = active or SparkSession._instantiatedSession
    if classic is not None and classic.sparkContext._jsc is not None:
        return classic
    # Importing it pulls in pandas and grpc; a process with a Connect session has done so.
    connect = sys.modules.get("pyspark.sql.connect.session")
    if connect is None:
        return None
    remote = connect.SparkSession.getActiveSession() or connect.SparkSession._default_session
    return cast("SparkSession | None", remote)


def driver_gpus() -> tuple[str, ...] | None:
    """Addresses of the GPUs that Spark's discovery found for the driver (``spark.driver.resource.gpu.amount``).

    ``None`` where there is no classic context, or it was given none.
    """
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    found = context.resources.get(_GPU) if context is not None else None
    return tuple(found.addresses) if found is not None else None


def is_connect(session: SparkSession) -> bool:
    """Whether a session talks to a Spark Connect server."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def master_of(session: SparkSession) -> str:
    """The master URL, from the context itself where there is one: a session's setting can be changed later."""
    if is_connect(session):
        return str(session.conf.get("spark.master", ""))
    return str(session.sparkContext.master)


def is_cluster(session: SparkSession) -> bool:
    """Whether the session has executors of its own: any master but ``local`` and ``local[...]``; any Connect server."""
    return is_connect(session) or re.match(r"local(\[|$)", master_of(session)) is None


def ranks_per_task(session: SparkSession, num_processes: int, use_gpu: bool) -> int:
    """How many ranks one Spark task hosts: its GPUs, or one.

    Raises:
        ConfigurationError: the GPU amount is no whole number, or does not divide ``num_processes``.
        ResourceError: GPUs are wanted, but Spark gives tasks none.
    """
    if not use_gpu:
        return 1
    text = str(_conf(session, _GPU_AMOUNT, "0"))
    try:
        amount = float(text)
    except ValueError:
        raise ConfigurationError(f"{_GPU_AMOUNT} is {text!r}: it must be a whole number of GPUs per task") from None
    if amount == 0:
        raise ResourceError(
            f"use_gpu=True, but '{_GPU_AMOUNT}' was unset, so Spark gives tasks no GPU: set it (usually to 1) with "
            "spark.executor.resource.gpu.amount and a discovery script, or pass use_gpu=False to train on CPUs"
        )
    if amount != int(amount) or amount < 0:
        raise ConfigurationError(
            f"{_GPU_AMOUNT} is {text}: ranks cannot share a GPU (NCCL refuses two ranks on one device); set it to 1"
        )
    if num_processes % int(amount):
        raise ConfigurationError(
            f"num_processes={num_processes} must be a multiple of {_GPU_AMOUNT}={int(amount)}: "
            "each task hosts as many ranks as it has GPUs"
        )
    return int(amount)


class _FailedRows:
    """The rows of a failed run, brought by an accumulator: Spark delivers those as each task ends, before the job does.

    It is the accumulator's parameter on the driver; in its place, tasks get one that PySpark has, which only adds.

    Args:
        expected: how many tasks bring rows.
        on_complete: called with all rows once they are here, in a thread of its own.
    """

    def __init__(self, expected: int, on_complete: Callable[[Sequence[bytes]], None]) -> None:
        self._expected = expected
        self._on_complete = on_complete
        self._by_task: dict[int, tuple[bytes, ...]] = {}

    @property
    def rows(self) -> list[bytes]:
        return [row for rows in list(self._by_task.values()) for row in rows]

    @property
    def complete(self) -> bool:
        return 0 < self._expected <= len(self._by_task)

    def zero(self, _value: object) -> tuple[()]:
        return ()

    def addInPlace(self, _value: object, update: Iterable[tuple[int, tuple[bytes, ...]]]) -> tuple[()]:  # noqa: N802
        """Called by PySpark while Spark's scheduler waits: must neither take long nor raise."""
        before = self.complete
        for partition, rows in update:
            self._by_task.setdefault(partition, rows)  # should Spark start the stage again, the first is the truest
        if self.complete and not before:
            threading.Thread(target=self._on_complete, args=(self.rows,), name="distributor-fail", daemon=True).start()
        return ()

    def __reduce__(self) -> tuple[Any, ...]:
        from pyspark.accumulators import AddingAccumulatorParam

        return AddingAccumulatorParam, ((),)


class SparkScheduler:
    """Runs a job as barrier tasks of a session.

    Args:
        session: an active session, classic or Connect.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._connect = is_connect(session)
        self._tag = ""
        self._cancelled = threading.Event()
        self._missing_slots = ""

    def check(self, job: Job) -> None:
        """Everything that can be known to be wrong before anything starts.

        Raises:
            ConfigurationError: a setting of the session rules barrier mode out, or asks for encryption, which there is
                none of between ranks, and nobody has said that this is acceptable.
            ResourceError: more slots are needed than the cluster can ever give.
        """
        self._check_encryption(job)
        if _is_true(_conf(self._session, "spark.dynamicAllocation.enabled", "false")):
            raise ConfigurationError(
                "spark.dynamicAllocation.enabled is true: Spark's barrier mode does not run with it (SPARK-24942); "
                "set it to false and spark.executor.instances to the executors that training needs"
            )
        if job.use_gpu and not is_cluster(self._session):
            raise ResourceError(
                f"Spark with master {master_of(self._session)} has no executors, and gives its tasks no GPUs: "
                "pass local_mode=True to train on this machine's GPUs"
            )
        most = self._most_slots()
        if most is not None and job.num_tasks > most:
            raise ResourceError(self._too_few(job, most))

    def _encryption(self) -> list[str]:
        """The settings of the session that ask for encryption."""
        return [key for key in _ENCRYPTION if _is_true(_conf(self._session, key, "false"))]

    def _check_encryption(self, job: Job) -> None:
        settings = self._encryption()
        if not settings:
            return
        accept = f"{'deepspeed' if job.launch_path == 'deepspeed' else 'pytorch'}.spark.distributor.ignoreSsl"
        told = (
            f"{' and '.join(settings)} {'is' if len(settings) == 1 else 'are'} true, but ranks do not keep to it. NOT "
            "encrypted: NCCL's and gloo's traffic between ranks (gradients, parameters) and torch's rendezvous store. "
            "Encrypted: log lines and orders between nodes and driver (TLS). What goes through Spark (the function, "
            "results) is as Spark's settings have it; spark.authenticate alone encrypts nothing"
        )
        if not _is_true(self._session.conf.get(accept, "false")):
            raise ConfigurationError(f"{told}. To accept that, set {accept} to true in the Spark configuration")
        _log.warning("%s; accepted by %s", told, accept)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        if self._connect:
            return threading.Thread(target=target, name="distributor-run")
        from pyspark import InheritableThread

        # The run's jobs stay in the caller's job group, so that cancelling that cancels them.
        return InheritableThread(target=target)

    def waiting_for(self) -> str | None:
        if self._missing_slots:
            return self._missing_slots
        if self._connect or self._tasks_running():
            return None
        return "waiting for Spark to start its tasks: other jobs may hold the slots"

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
            raise _translate(error, job) from None

    def _run(self, job: Job, server: ChannelServer) -> Collected:
        self._await_slots(job)
        host, bind = self._driver_address()
        try:
            at = server.listen(bind, host, job.driver_ports)
            endpoint = (at.host, at.port, at.certificate, at.token)
        except OSError as error:
            where = f"{bind}, ports {job.driver_ports[0]}-{job.driver_ports[1]}" if job.driver_ports else bind
            _log.warning("cannot listen on %s (%s): the run has no live log lines", where, error)
            endpoint = None
        shipment: Shipment = {
            "run_id": job.run_id,
            "job": pickle.dumps(job),
            "package": shipping.package_zip(),
            "endpoint": endpoint,
            # mapInArrow takes a second by itself, and a Connect client is seldom reachable.
            "exchange": not self._connect,
            "silence": job.heartbeat_timeout,
            "warmth": start.warmth(job),
            "driver_host": host,
            "gpu": _GPU if job.use_gpu else None,
            "chunk": _CHUNK_CONNECT if self._connect else _CHUNK_CLASSIC,
            "patience": job.grace_period + _FAILED_MARGIN,
            # A report holds tracebacks and log lines: it does not cross an encrypted network in the clear.
            "key": None if self._encryption() else secrets.token_bytes(32),
        }
        self._tag = f"distributor-{job.run_id}"
        task = _make_task(shipment)
        if self._connect:
            return _sort(self._collect_connect(job, task))
        return replace(_sort(self._collect_classic(job, task)), times=self._times())

    def _collect_classic(self, job: Job, task: Task) -> Iterable[bytes]:
        from pyspark import accumulators

        context = self._session.sparkContext
        failed = _FailedRows(job.num_tasks - 1, self._fail_job)
        # Made by hand: SparkContext.accumulator numbers them without a lock; two runs with one number would mix.
        accumulator: Any = accumulators.Accumulator(cast(Any, self._tag), (), cast(Any, failed))
        failed_rows = accumulator if job.num_tasks > 1 else None
        for tag in (self._tag, *_session_tags(self._session)):  # of this thread, which ends with the run
            context.addJobTag(tag)
        context.setJobDescription(f"distributor {job.run_id}: {job.title} on {job.num_processes} ranks")
        try:
            tasks = context.parallelize(range(job.num_tasks), job.num_tasks).barrier()
            rows = tasks.mapPartitions(lambda _rows: task(failed_rows)).collect()
            return [*rows, *(row for row in failed.rows if row not in rows)]
        except Exception:
            if failed.complete:
                return failed.rows
            raise
        finally:
            accumulators._accumulatorRegistry.pop(accumulator.aid, None)

    def _fail_job(self, rows: Sequence[bytes]) -> None:
        """Has Spark show the job as failed, and why."""
        scala = self._session.sparkContext._jsc.sc()
        reason = f"by distributor: {_why(_sort(rows))}"
        with suppress(Exception):  # then nobody cancels the job, and the holder gives up in time
            try:
                scala.cancelJobsWithTag(self._tag, reason)
            except Exception:  # Spark 3.5 takes no reason
                scala.cancelJobsWithTag(self._tag)

    def _collect_connect(self, job: Job, task: Task) -> Iterable[bytes]:
        def in_arrow(batches: Iterable[Any]) -> Iterator[Any]:
            import pyarrow as pa

            for _ in batches:
                pass
            for piece in task():
                yield pa.RecordBatch.from_arrays([pa.array([piece], pa.binary())], ["piece"])

        self._session.addTag(self._tag)
        try:
            rows = self._session.range(0, job.num_tasks, 1, job.num_tasks)
            result = rows.mapInArrow(in_arrow, "piece binary", barrier=True)
            if hasattr(result, "toArrow"):
                return [piece.as_buffer().to_pybytes() for piece in result.toArrow().column("piece")]
            return [bytes(row[0]) for row in result.collect()]
        finally:
            self._session.removeTag(self._tag)

    def _driver_address(self) -> tuple[str, str]:
        """The driver's address as nodes should use it, and the one to bind."""
        if not self._connect:
            context = self._session.sparkContext
            host = str(context.getConf().get("spark.driver.host") or "127.0.0.1")
            return host, str(context.getConf().get("spark.driver.bindAddress") or host)
        server = self._session.client.host
        host = network.address_towards(str(server)) or "127.0.0.1"
        return host, host

    def _most_slots(self) -> int | None:
        """Task slots that the cluster can have at most; ``None`` if that is not known."""
        master = master_of(self._session)
        cpus = int(_conf(self._session, "spark.task.cpus", "1"))
        local = re.fullmatch(r"local(?:\[(\d+|\*)(?:\s*,\s*\d+)?\])?", master)
        if local is not None:
            if local.group(1) == "*":
                return None if self._connect else int(self._session.sparkContext.defaultParallelism) // cpus
            return int(local.group(1) or 1) // cpus
        cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master)
        if cluster is not None:
            return int(cluster.group(1)) * self._executor_slots(int(cluster.group(2)), cpus)
        instances = _conf(self._session, "spark.executor.instances", None)
        cores = _conf(self._session, "spark.executor.cores", None)
        if instances and cores and int(instances) > 0:
            return int(instances) * self._executor_slots(int(cores), cpus)
        return None

    def _executor_slots(self, cores: int, cpus: int) -> int:
        """Tasks that fit on one executor: what is scarcer, its cores or its GPUs, decides."""
        slots = cores // cpus
        per_task = float(_conf(self._session, _GPU_AMOUNT, None) or 0)
        if per_task > 0:
            slots = min(
                slots, int(float(_conf(self._session, "spark.executor.resource.gpu.amount", None) or 0) / per_task)
            )
        return slots

    def _current_slots(self) -> int | None:
        """Task slots of the executors that have come so far, GPUs considered; ``None`` on Connect: it cannot tell."""
        if self._connect:
            return None
        scala = self._session.sparkContext._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return int(scala.maxNumConcurrentTasks(profile))

    def _await_slots(self, job: Job) -> None:
        """Waits for executors that are still coming; the run's start timeout cancels that.

        Raises:
            RunCancelledError: the run was cancelled meanwhile.
        """
        shown = None
        while (slots := self._current_slots()) is not None and slots < job.num_tasks:
            self._missing_slots = self._too_few(job, slots)
            if slots != shown:
                shown = slots
                _log.warning("waiting for %d task slots: the cluster has %d now", job.num_tasks, slots)
            if self._cancelled.wait(_SLOT_POLL):
                raise RunCancelledError(f"run {job.run_id} was cancelled while it waited for slots")
        self._missing_slots = ""

    def _too_few(self, job: Job, slots: int) -> str:
        gpu = f" with {job.ranks_per_task} GPU each ({_GPU_AMOUNT})" if job.use_gpu else ""
        return (
            f"num_processes={job.num_processes} needs {job.num_tasks} task slots at once{gpu}, "
            f"and the cluster ({master_of(self._session)}) has {slots}: lower num_processes, or raise "
            "spark.executor.instances or spark.executor.cores, or lower spark.task.cpus"
        )

    def _tasks_running(self) -> bool:
        """Whether Spark has started tasks of this run."""
        return any(stage.numActiveTasks() > 0 for stage in self._stages())

    def _times(self) -> dict[str, float]:
        """When Spark submitted the stage, in seconds since the epoch, if it still knows."""
        with suppress(Exception):
            return {"stage": max(stage.submissionTime() for stage in self._stages()) / 1000}
        return {}

    def _stages(self) -> list[Any]:
        """Spark's own view of the run's stages."""
        tracker = self._session.sparkContext._jsc.sc().statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(self._tag)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job.isDefined() for stage in job.get().stageIds()]
        return [stage.get() for stage in stages if stage.isDefined()]


def _is_true(setting: Any) -> bool:
    return str(setting).strip().lower() == "true"


def _conf(session: SparkSession, key: str, default: str | None) -> Any:
    """A setting, from the context where there is one."""
    if is_connect(session):
        return session.conf.get(key, default)
    return session.sparkContext.getConf().get(key, default)


def _session_tags(session: SparkSession) -> list[str]:
    """The tag by which ``spark.interruptAll()`` finds what a classic session runs; Spark 3.5 has none."""
    try:
        return [str(cast(Any, session)._jsparkSession.sessionJobTag())]
    except Exception:
        return []


@cache
def _portable_task() -> bytes:
    """``run_task`` pickled by value with all that it uses of this package: workers need not have it."""
    import pyspark.cloudpickle as spark_cloudpickle

    import distributor

    spark_cloudpickle.register_pickle_by_value(distributor)
    try:
        pickled: bytes = spark_cloudpickle.dumps(run_task)
        return pickled
    finally:
        spark_cloudpickle.unregister_pickle_by_value(distributor)


def _make_task(shipment: Shipment) -> Task:
    """What Spark pickles: a nested function, which travels by value and needs nothing but the standard library."""
    pickled = _portable_task()

    def task(failed_rows: Any = None) -> Iterator[bytes]:
        import pickle

        pieces: Iterator[bytes] = pickle.loads(pickled)(shipment, failed_rows)
        return pieces

    return task


def _sort(pieces: Iterable[bytes]) -> Collected:
    """What the tasks yielded, by kind."""
    reports, values, lost, logs = [], {}, [], []  # type: ignore[var-annotated]
    for piece in pieces:
        kind, body = piece[:1], memoryview(piece)[1:]
        if kind == b"R":
            reports.append(pickle.loads(body))
        elif kind == b"V":
            (rank,) = struct.unpack_from("!I", body)
            values.setdefault(rank, []).append(body[4:])
        elif kind == b"G":
            rank, stream, offset = _OUTPUT.unpack_from(body)
            logs.append(Log(rank, stream, offset, bytes(body[_OUTPUT.size :])))
        else:
            lost.append(bytes(body).decode())
    return Collected(tuple(reports), values, tuple(lost), tuple(logs))


def _why(collected: Collected) -> str:
    """Why a run failed, in one line."""
    failures = [o.failure for report in collected.reports for o in report.outcomes if o.state == "failed" and o.failure]
    errors = [report.error[1] for report in collected.reports if report.error is not None]
    if errors:
        text = errors[0]
    elif failures:
        text = outcomes.describe(outcomes.order_failures(failures))
    elif collected.lost_hosts:
        text = str(outcomes.node_lost(collected.lost_hosts))
    else:
        text = "the ranks were stopped: the run was cancelled, or a node was lost"
    return text.partition("\n")[0]


def _translate(error: Exception, job: Job) -> DistributorError:
    """Spark's exception as one of ours: the reason in one line, and no Java stack."""
    text = str(error)
    if "spark.driver.maxResultSize" in text:
        size = re.search(r"Total size of serialized results of \d+ tasks? \(([^)]*)\)", text)
        return ResultError(
            f"the return values{f' ({size.group(1)})' if size else ''} are larger than spark.driver.maxResultSize "
            "allows: raise that setting (and spark.driver.memory with it), or write a checkpoint to shared storage and "
            "return its path"
        )
    if re.search(r"cancelled|canceled|interrupted|OPERATION_CANCELED", text, re.IGNORECASE):
        return RunCancelledError(f"the Spark job of run {job.run_id} was cancelled: {_reason(text)}")
    if "BarrierJobSlotsNumberCheckFailed" in text or "requires more slots" in text:
        return ResourceError(
            f"num_processes={job.num_processes} needs {job.num_tasks} task slots at once, and the cluster has fewer: "
            f"{_reason(text)}"
        )
    return NodeLostError(f"the Spark job of run {job.run_id} failed: {_reason(text)}")


def _reason(text: str) -> str:
    """Why, from a Java exception's text: Spark's own line, and the Python exception in a worker if there was one."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    spark = next(
        (line for line in lines if re.search(r"Job aborted|cancelled|Lost task", line)), lines[0] if lines else ""
    )
    spark = re.sub(r"^[:\s]*(?:[\w.$]+(?:Exception|Error): )+", "", spark)[:500] or "no reason given"
    in_worker = [line for line in lines if re.match(r"(?!org\.|java\.|scala\.|py4j\.)[\w.]*(Error|Exception): ", line)]
    return f"{spark} (in a Python worker: {in_worker[-1][:500]})" if in_worker else spark
