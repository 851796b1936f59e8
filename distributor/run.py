"""One execution of a job and its handle on the driver."""

from __future__ import annotations

import enum
import logging
import threading
import time
from typing import Any, Protocol

from distributor import outcomes
from distributor.channel.frames import Log
from distributor.channel.server import ChannelServer
from distributor.console import Console
from distributor.errors import NodeLostError, RunCancelledError, StartError, TrainingError
from distributor.job import Failure, Job, Node, Placement
from distributor.outcomes import Collected

_log = logging.getLogger("distributor")

#: Seconds beyond the grace after which a run that should stop is ended the hard way.
_STOP_MARGIN = 5.0


class Status(enum.Enum):
    """Where a run stands."""

    WAITING = "waiting"
    """for slots, and for its nodes to come up"""
    STARTING = "starting"
    """all nodes are there, ranks are on their way"""
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Scheduler(Protocol):
    """Where a job runs. ``run`` blocks in the thread that ``thread`` made; ``cancel`` may come from any."""

    def thread(self, target: Any) -> threading.Thread:
        """A thread that may call ``run``."""

    def run(self, job: Job, server: ChannelServer) -> Collected:
        """Runs a job to its end; failures of ranks are data, not exceptions."""

    def cancel(self) -> None:
        """Ends the run the hard way: without a grace for ranks, where they did not hear of it."""

    def waiting_for(self) -> str | None:
        """Why the run's nodes cannot start yet; ``None`` if its tasks are running."""


class Run:
    """The handle of one run, made by ``TorchDistributor.submit``.

    Example:
        >>> run = TorchDistributor(num_processes=4, use_gpu=False).submit(train)  # doctest: +SKIP
        >>> run.wait(60) or run.cancel()  # doctest: +SKIP
        >>> run.results()  # doctest: +SKIP
    """

    def __init__(self, job: Job, scheduler: Scheduler) -> None:
        self.id = job.run_id
        self._job = job
        self._scheduler = scheduler
        self._console = Console(self._host_of)
        self._server: ChannelServer | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._status = Status.WAITING
        self._placement: Placement | None = None
        self._known_nodes: set[str] = set()
        self._started_nodes: set[str] = set()
        self._live_failures: list[Failure] = []
        self._lost: list[str] = []
        self._cancelled = False
        self._start_error: str | None = None
        self._values: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._timings: dict[str, float] = {}
        self._submitted = time.time()
        self._timers: list[threading.Timer] = []
        self._thread = scheduler.thread(self._execute)
        self._thread.daemon = True
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Run {self.id}: {self._job.num_processes} processes, {self.status.value}>"

    @property
    def status(self) -> Status:
        """Where the run stands now."""
        with self._lock:
            return self._status

    @property
    def placement(self) -> Placement | None:
        """Who runs where; ``None`` until the first node has told."""
        return self._placement

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by phase, once the run has ended: schedule, import, start, train, collect, total.

        Phases end when the slowest node has ended them. Clocks of different hosts are compared as they are.
        """
        return dict(self._timings)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, at most so many seconds; whether it has come."""
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Rank 0's return value; ``None`` for a script or a module.

        Args:
            timeout: seconds to wait at most; ``None`` waits for as long as it takes.

        Raises:
            TimeoutError: the run has not ended by then; it goes on.
            TrainingError: a rank failed.
            NodeLostError: a node went away.
            ResultError: the value cannot be brought back.
            StartError: the run could not start.
            RunCancelledError: it was cancelled.
        """
        self._await(timeout)
        return self._values.get(0)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Every rank's return value, in rank order. Raises what :meth:`result` raises."""
        self._await(timeout)
        return [self._values.get(rank) for rank in range(self._job.num_processes)]

    def cancel(self) -> None:
        """Stops all ranks: SIGTERM, the grace period, SIGKILL. Returns at once; ``wait`` waits for the end."""
        with self._lock:
            if self._done.is_set() or self._cancelled:
                return
            self._cancelled = True
        self._stop("cancelled")

    def _await(self, timeout: float | None) -> None:
        if not self._done.wait(timeout):
            raise TimeoutError(f"run {self.id} has not ended within {timeout} s; it is {self.status.value}")
        if self._error is not None:
            raise self._error

    def _execute(self) -> None:
        status = Status.FAILED
        try:
            with ChannelServer(self) as self._server:
                self._later(self._job.start_timeout, self._check_started)
                collected = self._scheduler.run(self._job, self._server) if not self._cancelled else Collected()
                try:
                    self._values = self._judge(collected)
                    status = Status.SUCCEEDED
                finally:
                    self._note_report(collected)
        except BaseException as error:
            self._error = self._explain(error)
            if isinstance(self._error, RunCancelledError):
                status = Status.CANCELLED
        finally:
            for timer in self._timers:
                timer.cancel()
            self._console.flush()
            with self._lock:
                self._status = status
            self._done.set()

    def _judge(self, collected: Collected) -> dict[int, Any]:
        """The values, or the exception that says why there are none."""
        if self._cancelled:  # ranks that used their grace may well have ended with 0
            raise RunCancelledError(f"run {self.id} was cancelled")
        failed = any(o.state == "failed" for report in collected.reports for o in report.outcomes)
        if self._start_error is not None and not failed:
            raise StartError(self._start_error)
        if self._lost and not failed:
            raise outcomes.node_lost(self._lost)
        return outcomes.values(collected, self._job.num_processes)

    def _explain(self, error: BaseException) -> BaseException:
        """The truest exception for a run that ended with this one."""
        if self._cancelled:
            return RunCancelledError(f"run {self.id} was cancelled")
        if self._start_error is not None:
            return StartError(self._start_error)
        if isinstance(error, TrainingError) and not isinstance(error, NodeLostError):
            return error
        # The reason of a failure that was told live is better than that its node or the job went away after it.
        if self._live_failures and not isinstance(error, StartError):
            return outcomes.training_error(self._live_failures)
        if self._lost and not isinstance(error, StartError):
            return outcomes.node_lost(self._lost)
        return error

    def _stop(self, reason: str) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._status = Status.STOPPING
        server = self._server
        if server is not None:
            server.stop(reason)
        # Ranks that hear of it get their grace, and what is left of a lost node can still be reported; where no node
        # was ever there to hear, there is nothing to wait for.
        delay = self._job.grace_period + _STOP_MARGIN if self._placement is not None else 0.0
        self._later(delay, self._scheduler.cancel)

    def _later(self, delay: float, action: Any) -> None:
        timer = threading.Timer(delay, action)
        timer.daemon = True
        timer.name = "distributor-timer"
        self._timers.append(timer)
        timer.start()

    def _check_started(self) -> None:
        """The start timeout has passed."""
        if self.status not in (Status.WAITING, Status.STARTING):
            return
        waiting = self._known_nodes - self._started_nodes
        if waiting:
            reason = f"ranks are not up on {len(waiting)} of {len(self._known_nodes)} nodes"
        elif self._known_nodes:
            return  # the other nodes do not reach the channel: nobody can tell how far they are
        else:
            reason = self._scheduler.waiting_for() or ""
            if not reason:
                return  # tasks run, but none reaches the channel
        self._start_error = f"the run did not start within start_timeout={self._job.start_timeout:g} s: {reason}"
        self._stop("start timeout")

    # What the channel tells (distributor.channel.server.Listener); in the channel's thread.

    def on_log(self, log: Log) -> None:
        self._console.write(log)

    def on_event(self, node: str, event: dict[str, Any]) -> None:
        name = event.get("event")
        self._known_nodes.add(node)
        if name == "hello" and self._placement is None:
            self._placement = Placement(
                tuple(Node(**{**fields, "gpus": tuple(fields["gpus"])}) for fields in event["placement"])
            )
            self._advance(Status.STARTING)
        elif name == "started":
            self._started_nodes.add(node)
            if self._placement is not None and len(self._started_nodes) == len(self._placement.nodes):
                self._advance(Status.RUNNING)
        elif name == "failed":
            if event.get("failure") is not None:
                self._live_failures.append(Failure(**event["failure"]))
            self._stop("a rank failed")

    def on_lost(self, node: str) -> None:
        host = next((n.host for n in self._placement.nodes if n.executor == node), node) if self._placement else node
        self._lost.append(host)
        self._stop(f"lost the node on {host}")

    def _advance(self, status: Status) -> None:
        with self._lock:
            if self._status in (Status.WAITING, Status.STARTING):
                self._status = status

    def _host_of(self, rank: int) -> str:
        return self._placement.host_of(rank) if self._placement is not None else "?"

    def _note_report(self, collected: Collected) -> None:
        for report in collected.reports:
            if report.warning:
                _log.warning("%s", report.warning)
        ends = [self._submitted]
        for name, key in (("schedule", "agent"), ("import", "ready"), ("start", "started"), ("train", "exited")):
            ends.append(max((r.times[key] for r in collected.reports if key in r.times), default=ends[-1]))
            self._timings[name] = max(0.0, ends[-1] - ends[-2])
        now = time.time()
        self._timings["collect"] = max(0.0, now - ends[-1])
        self._timings["total"] = now - self._submitted
