"""Runs barrier tasks in a classic Spark session, as an RDD in barrier mode.

The Spark job of a failed run must fail too. A failed job returns no rows, so the channel brings the reports.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from distributor.channel import requests as exchange
from distributor.channel.server import ChannelServer
from distributor.errors import DistributorError
from distributor.outcomes import driver_failures, verdict
from distributor.outcomes.failures import describe, order_failures
from distributor.schedulers.spark import exceptions as spark_errors, gathering, status
from distributor.schedulers.spark.barrier import Delivery, pause
from distributor.schedulers.spark.harmful_settings import is_true
from distributor.schedulers.spark.placing import Placing, crowded, refuse
from distributor.schedulers.spark.rows import CROWDED, Task, sort
from distributor.schedulers.spark.sessions import Life, conf, context_for_tasks, life_of, named, without_bar
from distributor.schedulers.spark.slots import Cluster, Slots, profile
from distributor.schedulers.spark.spark_versions import cancel_jobs, session_tags
from distributor.shipping import package as shipping
from distributor.text import escapes, notices
from distributor.text.wording import count
from distributor.values.job import Job, StatusDetail
from distributor.values.outcome import Collected

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession


_log = notices.logger

_CHUNK = 8 << 20  # bytes of a piece of a return value

#: Seconds before which a task that cannot reach the driver does not begin: it tries, and then polls in allGather.
_EARLIEST = exchange.CONNECT_TIMEOUT + 1.0

_ATTEMPTS = 3  # times that a job is submitted if Spark loses its tasks before they begin
_KILLED_POLL = 0.1  # seconds between checks whether killed tasks still run
_SLOT_POLL = 0.5  # seconds between checks of too few slots
_KILLED_TASKS = 6.0  # seconds within which killed tasks end


class ClassicSession:
    """A classic Spark session, for one run."""

    slots_may_come = True  # executors come up one after the other, and other jobs end

    def __init__(self, session: SparkSession, cluster: Cluster, call: str = "distributor") -> None:
        self._session = session
        self._cluster = cluster
        self._call = call  # the user's, by which Spark's pages name the run's jobs
        self._tag = ""  # the tag of the run's Spark jobs; "" until the run begins to submit one
        self._server: ChannelServer | None = None  # set when the run begins to submit a Spark job
        self._left = gathering.Left()  # of the latest Spark job
        self._reached_before = False  # whether nodes had reached the driver before the job was submitted, again
        self._cancelled = threading.Event()
        self._held_up: StatusDetail | None = None  # what the run waits for before there is a Spark job
        self._large_call: Broadcast[Any] | None = None

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        from pyspark import InheritableThread

        # The run's jobs stay in the caller's job group, so that cancelling the group cancels them.
        return InheritableThread(target=target)

    def await_slots(self, job: Job) -> None:
        """Wait for executors, and for free slots if ranks per node are limited. The start timeout cancels the wait."""
        slots = Slots(self._session, self._cluster, job)
        while not slots.ready():
            self._held_up = _held_up(slots, job)
            pause(self._cancelled, _SLOT_POLL, job)
        self._held_up = None

    def driver_address(self) -> tuple[str, str]:
        host = str(conf(self._session, "spark.driver.host") or "127.0.0.1").strip("[]")
        return host, str(conf(self._session, "spark.driver.bindAddress") or host).strip("[]")

    def deliver(self, job: Job) -> Delivery:
        package, in_place = shipping.package_zip(), self._cluster.is_local
        rest, call = shipping.take_call(job)
        if call is not None:
            self._large_call = broadcast(self._session, call)
        return Delivery(rest, self._large_call, {}, package, exchange=True, chunk=_CHUNK, in_place=in_place)

    def collect(self, job: Job, task: Task, server: ChannelServer) -> Collected:
        """Run the Spark job, again if it ends for a temporary reason before any task has begun."""
        self._server, self._tag = server, f"distributor-{job.job_id}"
        slots = Slots(self._session, self._cluster, job)
        placing = Placing(job, lambda tasks: slots.room_beside(job.avoided, tasks))
        server.place_by(placing.place)
        try:
            return self._collect(job, task, server, placing)
        finally:
            if self._large_call is not None:
                with suppress(Exception):  # the context may be stopped
                    self._large_call.destroy()

    def _collect(self, job: Job, task: Task, server: ChannelServer, placing: Placing) -> Collected:
        deadline = time.monotonic() + job.deadlines.start_timeout
        lost = refused = 0
        while True:
            submitted = time.monotonic()
            pause(self._cancelled, 0.0, job)
            try:
                rows = list(self._submit(job, task, server))
            except Exception as error:
                self._await_killed(server)
                if placing.error is not None:
                    raise placing.error from None
                lost += 1
                if lost >= _ATTEMPTS or not self._costs_nothing(error, server, time.monotonic() - submitted):
                    raise
                server.start_again()
                _log.warning("starting run %s again: %s", job.label, spark_errors.reason(str(error)))
                self.await_slots(job)
                continue
            if placing.error is not None:
                raise placing.error
            is_crowded = CROWDED in rows[:1]
            if not (server.start_again() or is_crowded):
                return replace(sort(rows, server.receiver.get), times=status.times(self._session, self._tag))
            refused += 1
            refuse(job, crowded(job) if is_crowded else placing.why, refused, time.monotonic() > deadline)
            pause(self._cancelled, _SLOT_POLL, job)
            self.await_slots(job)

    def waiting_for(self, job: Job) -> StatusDetail | None:
        if self._held_up is not None:
            return self._held_up
        # Slots first, then stages: if this run's own tasks take the slots in between, the stages show it.
        held_up = _held_up(Slots(self._session, self._cluster, job), job)
        stages = status.stages_of(self._session, self._tag)
        if stages and status.have_started(self._session, stages):
            return None
        return held_up or StatusDetail(
            f"waiting for Spark to start {count(job.num_tasks, 'task')}" if stages else "sending the job to Spark"
        )

    def room(self, job: Job) -> int | None:
        return Slots(self._session, self._cluster, job).free()

    def leaving(self) -> str | None:
        if not is_true(conf(self._session, "spark.decommission.enabled")):
            return None  # asking about each executor takes a call
        return status.decommissioned(self._session, self._tag)

    def cancel(self) -> bool:
        self._cancelled.set()
        if not self._tag:
            return False
        if self._server is not None and (self._server.gathering or self._may_gather(self._server)):
            return True
        self._session.sparkContext.cancelJobsWithTag(self._tag)
        return False

    def _may_gather(self, server: ChannelServer) -> bool:
        """Return whether tasks may be in ``allGather``."""
        if server.exchanged:
            return False
        left_for = self._left.seconds(server.reached and not self._reached_before, time.monotonic())
        running_for = status.running_for(self._session, self._tag)
        return gathering.may_last(running_for, gathering.CLASSIC, left_for)

    def ended(self, job: Job) -> DistributorError | None:
        life = life_of(self._session)
        if life is Life.ALIVE:
            return None
        if life is Life.DEAD:
            return driver_failures.jvm_ended(job.label)
        return driver_failures.context_stopped(job.label, by_user=life is Life.STOPPED)

    def failures(self) -> Mapping[str, str]:
        return status.failures(self._session, self._tag)

    def _await_killed(self, server: ChannelServer) -> None:
        """If the run was cancelled while its tasks were starting, wait until these have ended.

        A task may run on for seconds after Spark has killed it, and must find the driver listening, which orders it to
        stop.
        """
        end = time.monotonic() + _KILLED_TASKS
        while self._cancelled.is_set() and not server.begun and time.monotonic() < end:
            if not status.are_running(self._session, self._tag):
                return
            time.sleep(_KILLED_POLL)

    def _costs_nothing(self, error: Exception, server: ChannelServer, elapsed: float) -> bool:
        """Return whether the job failed because Spark lost a worker or an executor before any task can have begun.

        Spark fails a barrier job when it loses one task, such as one in a reused worker that ends with the previous
        job.
        """
        if server.begun or not spark_errors.is_loss(error):
            return False
        earliest = 0.0 if server.address is None else _EARLIEST  # tasks begin at once if the driver does not listen
        waiting = server.reached or status.longest_failed(self._session, self._tag, elapsed) < earliest
        return waiting and not self._cancelled.is_set()

    def _submit(self, job: Job, task: Task, server: ChannelServer) -> Iterable[bytes]:
        """Run one Spark job to its end. Return the rows of its tasks."""
        context = context_for_tasks(self._session)
        reports = server.failed_reports
        self._left, self._reached_before = gathering.Left(), server.reached
        # In a thread of its own, since the channel's must not wait for Spark.
        fail = threading.Thread(target=self._fail_job, args=(server,), name="distributor-fail", daemon=True)
        reports.on_complete = fail.start
        for tag in (self._tag, *session_tags(self._session)):  # they apply to this thread's jobs
            context.addJobTag(tag)
        context.setJobDescription(
            f"distributor {job.label}: {job.title} on {count(job.resources.num_processes, 'rank')}"
        )
        try:
            tasks = context.parallelize(range(job.num_tasks), job.num_tasks).barrier()
            work = tasks.mapPartitions(lambda _rows: task())
            if job.task_profile is not None:
                work = work.withResources(profile(self._session, job.task_profile))
            with without_bar(self._session), named(context, self._call):
                rows = work.collect()
            return [*rows, *(row for row in reports.rows if row not in rows)]
        except Exception:
            if reports.complete:
                return reports.rows
            raise
        finally:
            with suppress(Exception):  # the context may be stopped
                context.removeJobTag(self._tag)

    def _fail_job(self, server: ChannelServer) -> None:
        """Cancel the Spark job of a failed run, so that Spark shows that it has failed, and why."""
        reason = f"by distributor: {_why(sort(server.failed_reports.rows), server.stop_reason)}"
        with suppress(Exception):  # if this does not cancel the job, its tasks end by themselves in time
            cancel_jobs(self._session.sparkContext._jsc.sc(), self._tag, reason)


def broadcast(session: SparkSession, file: IO[bytes]) -> Broadcast[Any]:
    """Return a broadcast of a file's content as it is: neither driver nor executor has a Python process that reads it.

    With ``spark.io.encryption.enabled``, tasks read the value from Spark, so it must be a pickle.
    """
    from pyspark import Broadcast

    context = session.sparkContext

    class Content(Broadcast[Any]):
        def dump(self, value: IO[bytes], f: BinaryIO) -> None:
            with f:
                shutil.copyfileobj(value, f, _CHUNK)

    file.seek(0)
    if is_true(conf(session, "spark.io.encryption.enabled")):
        return context.broadcast(file.read())
    return Content(context, file, context._pickled_broadcast_vars)


def _held_up(slots: Slots, job: Job) -> StatusDetail | None:
    """Return what a run waits for: executors, or slots that other jobs occupy; ``None`` if it need not wait."""
    total, free = slots.total(), slots.free()
    if total < job.num_tasks:
        return StatusDetail("waiting for executors", f": {slots.too_few(total)}", yields=True)
    if free < job.num_tasks:
        why = "; other jobs hold the rest" if slots.busy() else ""
        there = f"{free or 'none'} {'is' if free < 2 else 'are'} free"
        return StatusDetail(f"waiting for {count(job.num_tasks, 'task slot')}", f": {there}{why}")
    return None


def _why(collected: Collected, stopped_for: str) -> str:
    """Return why a run failed, in one line; ``stopped_for`` if the reports give no reason."""
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
    return escapes.plain(text.partition("\n")[0])
