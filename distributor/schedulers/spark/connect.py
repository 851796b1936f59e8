"""Runs barrier tasks on Spark Connect, with ``mapInArrow``. Large content is sent in advance, as artifacts."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from distributor.channel.server import ChannelServer
from distributor.errors import DistributorError
from distributor.machine import network
from distributor.schedulers.spark import gathering
from distributor.schedulers.spark.barrier import Delivery, pause
from distributor.schedulers.spark.placing import crowded, refuse
from distributor.schedulers.spark.rows import CROWDED, Task, sort
from distributor.schedulers.spark.sessions import conf, set_connect_python
from distributor.schedulers.spark.slots import Slots, cluster_of, profile
from distributor.schedulers.spark.spark_versions import binary_values, progress_to
from distributor.shipping import package as shipping
from distributor.text.wording import size
from distributor.values.job import Job, StatusDetail
from distributor.values.outcome import Collected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: Bytes of a piece of a return value. By default, Spark Connect sends rows in messages of at most 4 MiB.
_CHUNK = 1 << 20

_INLINE = 1 << 20  # bytes of a part of the job that is sent within a query; larger ones are uploaded
_PLACE_AGAIN = 1.0  # seconds until a badly placed query is submitted again


@dataclass
class _Uploads:
    """The files that a session has uploaded. Its runs upload one at a time."""

    names: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


_uploaded: WeakKeyDictionary[SparkSession, _Uploads] = WeakKeyDictionary()


class StageProgress:
    """Finds out whether a Spark Connect server has started the tasks of a run's query (Spark 4).

    Other queries with the same number of tasks are mistaken for it.
    """

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._submitted = time.monotonic()
        self._queued = False
        self._started: float | None = None

    @property
    def waiting(self) -> bool:
        """Whether the server has reported the query, but has not run any of its tasks yet."""
        return self._queued and self._started is None

    def running_for(self, now: float) -> float | None:
        """Return for how many seconds tasks may have run, at most; ``None`` if the server has not started them."""
        if self.waiting:
            return None
        return now - (self._submitted if self._started is None else self._started)

    def __call__(self, stages: Iterable[Any], inflight_tasks: int, operation_id: str, done: bool) -> None:
        """Record the progress of a query. PySpark calls this about every two seconds."""
        if any(stage.num_tasks == self._tasks for stage in stages):
            self._queued = True
            if self._started is None and inflight_tasks > 0:
                self._started = time.monotonic()


class ConnectSession:
    """A session of a Spark Connect server, for one run."""

    slots_may_come = False  # Spark Connect does not report slots

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._tag = ""  # the tag of the run's query; "" until the run begins to submit it
        self._query: StageProgress | None = None
        self._server: ChannelServer | None = None
        self._left = gathering.Left()
        self._held_up: StatusDetail | None = None  # what the run waits for before there is a query
        self._cancelled = threading.Event()

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        session: Any = self._session
        tags = tuple(session.getTags())

        def tagged() -> None:
            for tag in tags:  # the caller's, so that interruptTag ends the run too
                session.addTag(tag)
            target()

        return threading.Thread(target=tagged, name="distributor-run")

    def await_slots(self, job: Job) -> None:
        """Return at once, since Spark Connect does not report slots."""

    def driver_address(self) -> tuple[str, str]:
        host = network.address_towards(str(cast(Any, self._session).client.host).strip("[]")) or "127.0.0.1"
        if network.is_loopback(host):  # the server is on this machine; its executors need another address
            of_server = network.resolve(str(conf(self._session, "spark.driver.host", host)).strip("[]"))
            host = of_server if network.is_own(of_server) else host
        return host, host

    def deliver(self, job: Job) -> Delivery:
        package = self._upload(shipping.package_zip())
        rest, call = shipping.take_call(job)
        delivered = None if call is None else self._upload(call)
        rest, parts = shipping.detach(rest, _INLINE)
        names = {part: self._upload(content) for part, content in parts.items()}
        # No exchange: tasks can seldom reach the driver of a Connect session, and mapInArrow takes a second anyway.
        return Delivery(rest, delivered, names, package, exchange=False, chunk=_CHUNK)

    def collect(self, job: Job, task: Task, server: ChannelServer) -> Collected:
        """Run the query, again if Spark has put too many ranks on an executor.

        It does so if slots of others are not free yet: tasks of the previous job have not ended, or an executor is new.
        """
        self._server, self._tag = server, f"distributor-{job.job_id}"
        deadline = time.monotonic() + job.deadlines.start_timeout
        refused = 0
        pause(self._cancelled, 0.0, job)
        while CROWDED in (rows := list(self._submit(job, task)))[:1]:
            refused += 1
            refuse(job, crowded(job), refused, time.monotonic() > deadline)
            self._query, self._held_up = None, StatusDetail("waiting for slots on other executors")
            pause(self._cancelled, _PLACE_AGAIN, job)
            self._held_up = None
        return sort(rows, server.receiver.get)

    def waiting_for(self, job: Job) -> StatusDetail | None:
        if self._held_up is not None:
            return self._held_up
        busy = self._query is not None and self._query.waiting
        return StatusDetail("waiting for task slots", ": other jobs may hold them") if busy else None

    def room(self, job: Job) -> int | None:
        """Return how many slots there are by the settings, if these say; 0 once the query is submitted.

        Connect does not report how many of its slots are free.
        """
        return Slots(self._session, cluster_of(self._session), job).most() if not self._tag else 0

    def leaving(self) -> str | None:
        return None  # Spark Connect does not report it

    def cancel(self) -> bool:
        self._cancelled.set()
        if not self._tag:
            return False
        if self._query is not None and self._may_gather(self._query, time.monotonic()):
            return True
        self._session.interruptTag(self._tag)
        return False

    def _may_gather(self, query: StageProgress, now: float) -> bool:
        """Return whether tasks may be in ``allGather``."""
        left_for = self._left.seconds(self._server is not None and self._server.reached, now)
        return gathering.may_last(query.running_for(now), gathering.CONNECT, left_for)

    def ended(self, job: Job) -> DistributorError | None:
        return None  # if the server has ended, the error of the query says why

    def failures(self) -> Mapping[str, str]:
        return {}  # Spark Connect does not tell where tasks ran

    def _upload(self, content: bytes | IO[bytes]) -> str:
        """Make Spark Connect deliver content to executors as a file, once a session. Return the file's name.

        Within a query, the heaps of server and executors would contain several copies.
        """
        file: Any = io.BytesIO(content) if isinstance(content, bytes) else content
        length = file.seek(0, os.SEEK_END)
        file.seek(0)
        name = f"distributor-{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"
        uploaded = _uploaded.setdefault(self._session, _Uploads())
        self._held_up = StatusDetail(f"sending {size(length)} to the Spark Connect server")
        with uploaded.lock:  # Spark refuses a file while it receives the same file from another run
            if name not in uploaded.names:
                self._send(name, file)
                uploaded.names.add(name)
        self._held_up = None
        return name

    def _send(self, name: str, content: IO[bytes]) -> None:
        content.seek(0)
        with tempfile.TemporaryDirectory(prefix="distributor-") as folder:
            path = os.path.join(folder, name)
            with open(path, "wb") as file:
                shutil.copyfileobj(content, file)
            cast(Any, self._session).addArtifacts(path, file=True)

    def _submit(self, job: Job, task: Task) -> Iterable[bytes]:
        """Run the query to its end. Return the rows of its tasks."""

        def in_arrow(batches: Iterable[Any]) -> Iterator[Any]:
            import pyarrow as pa

            for _ in batches:
                pass
            for piece in task():
                yield pa.RecordBatch.from_arrays([pa.array([piece], pa.binary())], ["piece"])

        session: Any = self._session
        self._query = query = StageProgress(job.num_tasks)
        session.addTag(self._tag)
        try:
            set_connect_python(self._session)
            rows = self._session.range(0, job.num_tasks, 1, job.num_tasks)
            options: dict[str, Any] = {}
            if job.task_profile is not None:
                options["profile"] = profile(self._session, job.task_profile)
            with progress_to(session, query):
                return binary_values(rows.mapInArrow(in_arrow, "piece binary", barrier=True, **options), "piece")
        finally:
            with suppress(Exception):  # the user may have cleared all tags
                session.removeTag(self._tag)
