"""One execution of a job, and the driver's handle for it."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributor.channel import frames
from distributor.channel.server import ChannelServer
from distributor.display.console import Console
from distributor.display.logs import Logs
from distributor.display.snapshot import Snapshot
from distributor.display.view import View
from distributor.errors import DistributorError, NodeLostError, RunCancelledError, StallError, StartError, TrainingError
from distributor.outcomes import advice, timings, verdict
from distributor.outcomes.failures import has_cause, order_failures
from distributor.outcomes.stacks import Stacks, summary
from distributor.run.nodes import Nodes
from distributor.schedulers.base import Scheduler
from distributor.text import cells, notices
from distributor.values import messages
from distributor.values.job import Job, Status, Step
from distributor.values.messages import Message, Offset
from distributor.values.outcome import Collected, Failure, Log
from distributor.values.placement import Placement

_log = notices.logger

#: Seconds that a run waits before it asks the scheduler what it is waiting for.
_PATIENCE = 2.0

#: Seconds between two such questions.
_ASK = 0.5

#: Seconds to wait for a display that hangs, as at the end of a run.
_LOOK = 2.0

#: Seconds after the grace period until a run that has not stopped is cancelled through the scheduler.
_STOP_MARGIN = 5.0

#: Seconds that nodes get to kill their ranks and report, before the scheduler ends nodes and ranks together.
_KILL_MARGIN = 2.0

#: Seconds that the Spark job of a run with a lost node gets to end by itself, once every other node is gone too.
_LOST_MARGIN = 2.0

#: Seconds for which Spark runs a run's tasks without any of them reaching the driver, before a warning is logged.
_UNREACHED = 60.0

#: Seconds between checks of whether Spark runs the tasks.
_REACH_LOOK = 5.0

#: Seconds that ranks get to report their stacks before a stalled run is stopped.
_STALL_ANSWER = 5.0

#: Seconds that ranks get to report their stacks before an interrupted run is stopped.
_LAST_WORDS = 0.25

#: Seconds added to the time that ranks get, for the transfer of their answers.
_DUMP_MARGIN = 2.0


class Run:
    """The handle of one run, returned by ``TorchDistributor.submit``.

    Example:
        >>> run = TorchDistributor(num_processes=4, use_gpu=False).submit(train)  # doctest: +SKIP
        >>> run.wait(60) or run.cancel()  # doctest: +SKIP
        >>> run.results()  # doctest: +SKIP
    """

    def __init__(
        self,
        job: Job,
        scheduler: Scheduler,
        *,
        log_folder: Path | None = None,
        fold_logs: bool = False,
        log_prefix: bool = True,
        announce: bool = False,
        view: View | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.id = job.run_id
        #: The user's name for the run; ``None`` if it has no name.
        self.name = job.name
        #: The folder that receives every rank's whole output; ``None`` without ``log_dir``.
        self.log_folder = log_folder
        self._job = job
        self._scheduler = scheduler
        self._announce = announce
        self._view = view
        self._shown_end = False
        self._nodes = Nodes()
        console = Console(
            self._nodes.host_of, ranks=job.log_ranks, fold=fold_logs, world_size=job.num_processes, prefix=log_prefix
        )
        self._logs = Logs(console, log_folder)
        self._server: ChannelServer | None = None
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._done = threading.Event()
        self._status = Status.WAITING
        self._status_since = time.monotonic()
        self._ended: float | None = None
        self._awaited = 0
        self._asked = 0  # callers that wait for the result, and get an exception if there is none
        self._untold: list[str] = []  # why the run failed, until a caller has received the error
        weakref.finalize(self, _tell_untold, self._untold)
        self._telling: threading.Thread | None = None
        self._stopping = ""
        self._grace = job.grace_period
        self._waits: tuple[float, Step | None] = (0.0, None)  # when the scheduler was last asked, and its answer
        self._step = ("", 0.0)  # what the run does before its ranks are up, and since when it does that
        self._live_failures: dict[int, Failure] = {}
        self._lost: list[str] = []
        self._dumps: dict[int, dict[int, str]] = {}
        self._dump_numbers = itertools.count()
        self._dumped = threading.Condition()
        self._cancelled = False
        self._ended_by_us = False
        self._tasks_since: float | None = None
        self._unreached = False
        self._warned: set[tuple[str, str]] = set()
        self._start_error: str | None = None
        self._stall: StallError | None = None
        self._values: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._timings: dict[str, float] = {}
        self._submitted = time.time()
        self._timers: list[threading.Timer] = []
        notices.show_on(self._logs.note)
        for note in notes:
            self._logs.note(f"run {job.label}: {note}")
        self._look_on()  # in this thread, so that a notebook shows the run in the cell that is running now
        self._viewer = threading.Thread(target=self._keep_looking, name="distributor-view", daemon=True)
        try:
            self._thread = scheduler.thread(self._execute)
            self._thread.daemon = True
            self._thread.start()
        except BaseException:  # Spark's context was stopped, or no thread could be started
            self._close_logs()
            raise
        if view is not None:
            self._viewer.start()

    def __repr__(self) -> str:
        return f"<Run {self._job.label}: {self._job.num_processes} processes, {self.status.value}>"

    def _ipython_display_(self) -> None:
        """Show the live status in this cell too if the view can do that; otherwise let IPython ask for the HTML."""
        with self._looking:
            if self._view is None or self._shown_end or not self._view.show_again(self.snapshot()):
                raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return the run as HTML for a notebook: status, placement, where the time went, and why it failed."""
        from distributor.display import notebook

        return notebook.render(self.snapshot(), unfolded=True)

    @property
    def status(self) -> Status:
        """The current status of the run."""
        with self._lock:
            return self._status

    @property
    def placement(self) -> Placement | None:
        """Which ranks run on which nodes; ``None`` until the first node has reported.

        Example:
            >>> print(run.placement)  # doctest: +SKIP
            node 0 on host-a (10.0.0.2): ranks 0-2; node 1 on host-b (10.0.0.3): rank 3
        """
        return self._nodes.placement

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The final DeepSpeed configuration, with "auto" filled in where possible; ``None`` for a run without one."""
        config: str | None = getattr(self._job.launch, "config", None)
        return None if config is None else json.loads(config)

    @property
    def timings(self) -> dict[str, float]:
        """Duration of each phase in seconds, in order; empty until the run has ended.

        ========  =====================================================================================
        schedule  until Spark has submitted the stage
        worker    until the tasks run in their Python workers, including the wait for slots
        exchange  until each task knows the facts of all tasks
        agent     until each node's agent is up, including torch's import by a new warm process
        import    until the launcher can fork, including its import of torch if there is no warm process
        fork      until the ranks are forked
        call      until the last rank has called the function
        function  until the last function has returned, including the setup of process groups
        exit      until all ranks have ended
        collect   until the values are on the driver
        total     all phases together
        ========  =====================================================================================

        A phase ends when the last node or rank has ended it. Clocks of different hosts are compared without correction.
        Local mode has no tasks, so Spark's phases take no time.
        """
        return dict(self._timings)

    def snapshot(self) -> Snapshot:
        """Return everything that is known about the run at this moment, as a value.

        Example:
            >>> run.snapshot().ranks_up  # doctest: +SKIP
            4
        """
        now = time.monotonic()
        with self._lock:
            status, since = self._status, now - self._status_since
            seconds = (self._ended or time.time()) - self._submitted
        detail = ""
        if status is Status.STOPPING:
            left = self._grace - since
            detail = self._stopping + (f", ranks have {left:.0f} s to save" if left > 0 and self.placement else "")
        began = 0.0
        if status in (Status.WAITING, Status.STARTING):
            detail, began = self._doing(status, since)
        return Snapshot(
            run_id=self.id,
            name=self.name,
            title=self._job.title,
            world_size=self._job.num_processes,
            status=status,
            seconds=max(0.0, seconds),
            since=since,
            detail=detail,
            lasting=time.monotonic() - began if began else 0.0,
            nodes_up=self._nodes.up,
            ranks_up=self._nodes.ranks_up,
            placement=self.placement,
            lines=dict(self._logs.last_lines),
            timings=dict(self._timings),
            error=self._error,
            raised=self._asked > 0,
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended, for at most ``timeout`` seconds, and return whether it has."""
        with self._lock:
            self._awaited += 1
        try:
            return self._done.wait(timeout)
        finally:
            with self._lock:
                self._awaited -= 1

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the run and return rank 0's return value; ``None`` for a script or a module.

        Args:
            timeout: maximum number of seconds to wait; ``None`` (default) waits without a limit.

        Raises:
            TimeoutError: the run has not ended within ``timeout``; it continues.
            TrainingError: a rank failed.
            NodeLostError: a node went away.
            ResultError: the return value could not be brought back to the driver.
            StartError: the run could not start.
            RunCancelledError: the run was cancelled.
        """
        self._await(timeout)
        return self._values.get(0)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for the run and return every rank's return value, in rank order. Raises the errors of :meth:`result`."""
        self._await(timeout)
        return [self._values.get(rank) for rank in range(self._job.num_processes)]

    def cancel(self, why: str = "cancelled", *, say_where: bool = False) -> None:
        """Stop all ranks with SIGTERM and, after the grace period, SIGKILL.

        Returns at once; use ``wait`` to wait for the end. A run that is already stopping keeps its first reason: if a
        rank has failed, its failure remains the error.

        Args:
            why: the reason that the live status shows.
            say_where: log where the ranks were (default no), which helps a user who interrupts a hang. Ranks get a
                quarter of a second to report that before they are stopped.
        """
        if say_where:
            with suppress(RuntimeError):  # no thread can be started; stopping the ranks matters more
                self._say_where()
        with self._lock:
            if self._ended is not None or self._status is Status.STOPPING:  # keep the first reason
                return
            self._cancelled = True
        self._stop(why)

    def kill(self) -> None:
        """Kill all ranks without the grace period, or without the rest of it. Returns at once.

        A node that the driver cannot reach is stopped through Spark, and still gives its ranks the grace period.
        """
        self.cancel()
        with self._lock:
            if self._ended is not None:
                return
            self._stopping, self._grace = "killed", 0.0
        server = self._server
        if server is not None:
            server.stop("killed", grace=False)
        self._later(_KILL_MARGIN, self._end)

    def dump_stacks(self, timeout: float = 10.0, *, all_threads: bool = True) -> Stacks:
        """Return what every rank is doing now: the Python stacks of its threads, by rank.

        Ranks keep running, whether they compute, wait in a collective or hang. The text of a rank that cannot
        answer says why. The result is empty unless ranks are running.

        Args:
            timeout: number of seconds that ranks get to answer.
            all_threads: include all threads (default), or only the main thread. Python can crash when it lists a
                thread that is just starting (https://github.com/python/cpython/issues/116008): prefer ``False`` for
                healthy ranks that start threads all the time.

        Example:
            >>> print(run.dump_stacks())  # doctest: +SKIP
            ranks 0-6 in all_reduce at train.py:40; rank 7 in DataLoader at train.py:31
            ...
        """
        return self._stacks(self._ask_stacks(timeout, all_threads), timeout)

    def _say_where(self) -> None:
        """Ask ranks for their stacks and log a summary, without waiting, because the ranks are about to be stopped."""
        asked = self._ask_stacks(_LAST_WORDS, all_threads=False)
        if asked is not None:
            telling = threading.Thread(
                target=self._tell_stood, args=(asked,), name="distributor-interrupt", daemon=True
            )
            telling.start()
            self._telling = telling  # only once started, since an unstarted thread cannot be joined

    def _ask_stacks(self, timeout: float, all_threads: bool) -> int | None:
        """Ask all ranks for their stacks and return the request's number; ``None`` if no ranks are running."""
        server = self._server
        if server is None or self._ended is not None or not self._nodes.up:
            return None
        with self._dumped:
            number = next(self._dump_numbers)
            self._dumps[number] = {}
        server.order(messages.Dump(number, all_threads, timeout))
        return number

    def _stacks(self, number: int | None, timeout: float) -> Stacks:
        """Return the answers to a request, once all have arrived or the time is up."""
        if number is None:
            return Stacks({})
        with self._dumped:
            answers = self._dumps[number]
            self._dumped.wait_for(
                lambda: len(answers) == self._job.num_processes or self._ended is not None, timeout + _DUMP_MARGIN
            )
            del self._dumps[number]
            silent = "its node did not answer: it has ended, or has no connection to the driver"
            return Stacks({rank: answers.get(rank, silent) for rank in range(self._job.num_processes)})

    def _tell_stood(self, number: int) -> None:
        self._logs.note(f"run {self.id}: interrupted; {summary(self._stacks(number, _LAST_WORDS))}")

    def _await(self, timeout: float | None) -> None:
        with self._lock:
            self._asked += 1
        try:
            ended = self.wait(timeout)
        finally:
            with self._lock:
                self._asked -= 1
        if not ended:
            raise TimeoutError(f"run {self.id} has not ended within {timeout} s; it is {self.status.value}")
        self._untold.clear()
        if isinstance(self._error, DistributorError):
            raise self._error.with_traceback(None)  # hides the frames of this package
        if self._error is not None:
            raise self._error

    def _execute(self) -> None:
        status = Status.FAILED
        try:
            with ChannelServer(self, self._job.heartbeat_timeout, self._job.num_tasks) as self._server:
                self._later(self._job.start_timeout, self._check_started)
                self._later(_REACH_LOOK, self._check_reached)
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
            with self._lock:
                self._status, self._status_since, self._ended = status, time.monotonic(), time.time()
                for timer in self._timers:
                    timer.cancel()
            with self._dumped:
                self._dumped.notify_all()
            try:
                self._look_on()
                self._tell_end()
            finally:
                self._close_logs()
                self._done.set()

    def _close_logs(self) -> None:
        notices.leave(self._logs.note)
        self._logs.close()
        if self._logs.error is not None:
            _log.warning("the logs in %s are not complete: %s", self.log_folder, self._logs.error)

    def _tell_end(self) -> None:
        """Make sure that a failure is shown: by the exception if a caller waits for the result, otherwise by a note."""
        error = self._error
        if self._telling is not None:
            self._telling.join(_LOOK)
        failures = error.failures if isinstance(error, TrainingError) else ()
        self._logs.release(failure.rank for failure in failures if failure.traceback)
        if error is None or isinstance(error, RunCancelledError):
            return
        self._untold.append(f"run {self.id} has failed, and nobody has asked for its result: {error}")
        if not self._asked and (self._view is None or self._view.announces):
            what = str(error).partition("\n")[0]
            self._logs.note(f"run {self.id} has failed: {what} (its result() raises that, with all that is known)")

    def _judge(self, collected: Collected) -> dict[int, Any]:
        """Return the ranks' values, or raise the exception that says why there are none."""
        ended = self._why_we_ended_it()
        if ended is not None:  # ranks that stop within the grace period may exit with 0
            raise ended
        failures = [o.failure for report in collected.reports for o in report.outcomes if o.state == "failed"]
        if self._start_error is not None and not failures:
            raise StartError(self._start_error)
        if self._lost and not has_cause(failures):
            raise verdict.node_lost(self._lost)
        return verdict.values(collected, self._job.num_processes, self._advise)

    def _explain(self, error: BaseException) -> BaseException:
        """Return the exception that best explains why a run ended with ``error``."""
        ended = self._why_we_ended_it()
        if ended is not None:
            return ended
        if self._start_error is not None:
            return StartError(self._start_error)
        if isinstance(error, TrainingError) and not isinstance(error, NodeLostError):
            return error
        if isinstance(error, RunCancelledError) and not self._ended_by_us:  # cancelled from outside, through Spark
            return error
        if isinstance(error, StartError):
            return error
        # A failure that was reported live explains more than the loss of its node or job after it.
        live = list(self._live_failures.values())
        if live and not (self._lost and not has_cause(live)):
            return verdict.training_error(live, self._advise)
        return verdict.node_lost(self._lost) if self._lost else error

    def _advise(self, failure: Failure) -> str:
        if self._scheduler.on_driver:  # the ranks had the driver's files and packages
            return ""
        try:
            return advice.advise(failure, self._job)
        except Exception as error:  # third-party import finders may raise anything
            _log.debug("no advice for run %s: %s", self.id, error)
            return ""

    def _keep_looking(self) -> None:
        assert self._view is not None
        while not self._done.wait(self._view.interval):
            self._look_on()

    def _look_on(self) -> None:
        """Update the view with the current state of the run, unless another thread hangs while doing so."""
        if self._view is None or not self._looking.acquire(timeout=_LOOK):
            return
        try:
            snapshot = self.snapshot()
            if not self._shown_end:
                self._shown_end = snapshot.ended
                shown = self._view.show(snapshot, self._awaited > 0)
                for note in shown.notes:
                    self._logs.note(note)
                self._logs.footer(shown.footer)
        except Exception as error:  # a missing or broken display must not end the run
            _log.debug("run %s cannot be shown: %s", self.id, error)
        finally:
            self._looking.release()

    def _doing(self, status: Status, since: float) -> tuple[str, float]:
        """Return what the run does before its ranks are up, in words, and since when."""
        step = self._nodes.step
        if step is None and status is Status.WAITING:
            step = self._before_nodes(since)
        if step is None:
            return "", 0.0
        with self._lock:
            if self._step[0] != step.what:
                self._step = step.what, time.monotonic()
            return str(step), self._step[1]

    def _before_nodes(self, since: float) -> Step | None:
        """Return what the run does before anything is known about its nodes."""
        server = self._server
        if self._unreached:
            return Step("Spark runs the tasks, but no node has reached the driver")
        if server is not None and server.begun:
            return Step("starting a process on each node")
        if since < _PATIENCE:  # the scheduler may not have got to starting the nodes yet
            return None
        waits = self._waiting_for()
        if waits is not None or server is None:
            return waits
        return Step("waiting for Spark's tasks to reach the driver", f": {server.told} of {self._job.num_tasks} have")

    def _waiting_for(self) -> Step | None:
        """Return what the scheduler waits for. Caches the answer briefly, since it takes several calls to Spark."""
        asked, told = self._waits
        if time.monotonic() - asked > _ASK:
            with suppress(Exception):  # Spark's context may just be stopped
                told = self._scheduler.waiting_for()
            self._waits = time.monotonic(), told
        return told

    def _why_we_ended_it(self) -> RunCancelledError | StallError | None:
        return RunCancelledError(f"run {self.id} was cancelled") if self._cancelled else self._stall

    def _stop(self, reason: str) -> None:
        with self._lock:
            if self._ended is not None:
                return
            if self._status is not Status.STOPPING:
                self._status, self._status_since, self._stopping = Status.STOPPING, time.monotonic(), reason
        server = self._server
        if server is not None:
            server.stop(reason)
        # Ranks that receive the order get their grace period, and what is left of a lost node can still be reported.
        # If no node has ever connected, there is nothing to wait for.
        delay = self._job.grace_period + _STOP_MARGIN if self.placement is not None else 0.0
        self._later(delay, self._end)

    def _end(self) -> None:
        """End the run through the scheduler, without regard for the grace period."""
        self._ended_by_us = True
        self._scheduler.cancel()

    def _later(self, delay: float, action: Any) -> None:
        timer = threading.Timer(delay, action)
        timer.daemon = True
        timer.name = "distributor-timer"
        with self._lock:
            if self._ended is None:
                self._timers = [timer, *(other for other in self._timers if not other.finished.is_set())]
                timer.start()

    def _check_started(self) -> None:
        """Stop the run if its ranks are not up; called when the start timeout has passed."""
        if self.status not in (Status.WAITING, Status.STARTING):
            return
        step: Step | None
        if self._nodes.delayed:
            step = self._nodes.step or Step("starting ranks")
        elif self._nodes.known:
            return  # the other nodes cannot reach the channel, so their progress is unknown
        else:
            step = self._scheduler.waiting_for()
            if step is None:
                return  # tasks run, but none can reach the channel
        self._start_error = f"the run did not start within start_timeout={self._job.start_timeout:g} s: it was {step}"
        self._stop("start_timeout has passed")

    def _check_reached(self) -> None:
        """Warn early that no node reaches the driver. Nodes report it only at the end, and training may take days."""
        server = self._server
        if server is None or server.reached or self._done.is_set():
            return
        now = time.monotonic()
        waits: Step | None = Step("")
        with suppress(Exception):  # Spark's context may just be stopped
            waits = self._scheduler.waiting_for()
        if server.address is None or waits is not None:
            self._tasks_since = None
        elif self._tasks_since is None:
            self._tasks_since = now
        if self._tasks_since is None or now - self._tasks_since < _UNREACHED:
            self._later(_REACH_LOOK, self._check_reached)
            return
        self._unreached = True
        _log.warning(
            "run %s: its tasks have run for %g s, and no node has reached the driver at %s. The run goes on without "
            "live log lines; results and errors still arrive. If a firewall is in between, open the ports that "
            "driver_ports= names",
            self._job.label,
            _UNREACHED,
            server.address,
        )

    def _take_back_unreached(self, node: str) -> None:
        if self._unreached:
            self._unreached = False
            told = "run %s: the node on %s has now reached the driver: its log lines follow"
            _log.warning(told, self._job.label, self._nodes.describe(node))

    # The methods of distributor.channel.server.Listener, called in the channel's thread.

    def on_log(self, log: Log) -> None:
        self._logs.take(log)

    def offsets(self, node: str) -> tuple[Offset, ...]:
        return self._logs.offsets(self._nodes.ranks_of(node))

    def on_message(self, node: str, message: Message) -> None:
        if isinstance(message, messages.Importing):
            self._nodes.importing(node, message.module, message.nodes)
            return
        if isinstance(message, messages.Hello):
            self._nodes.arrived(node)
        else:
            self._nodes.heard(node)
        if isinstance(message, messages.Hello):
            if self.placement is None and message.placement:
                self._nodes.placement = Placement(message.placement)
                self._take_back_unreached(node)
                if self._announce:
                    self._logs.note(f"run {self._job.label}: {self._nodes}")
                self._advance(Status.STARTING)
        elif isinstance(message, messages.Started):
            self._nodes.started(node)
            if self._nodes.all_up:
                self._advance(Status.RUNNING)
        elif isinstance(message, messages.Beat):
            self._nodes.beat(node, message.alive, message.idle)
            self._check_stalled(node)
        elif isinstance(message, messages.Stacks):
            with self._dumped:
                if message.number in self._dumps:
                    self._dumps[message.number][message.rank] = cells.readable(message.text)
                    self._dumped.notify_all()
        elif isinstance(message, messages.Warnings):
            self._warn({text: [message.host] for text in message.texts})
        elif isinstance(message, messages.Skipped):
            self._logs.skip(message.rank, message.stream, message.lines, message.offset)
        elif isinstance(message, messages.Dead):
            self.on_lost(node, "its agent died")
        elif isinstance(message, messages.Orphaned):
            self.on_lost(
                node, "its Spark task ended: the Python worker or the executor was killed, or the job cancelled"
            )
        elif isinstance(message, messages.Failed):
            if message.failure is not None:
                self._live_failures.setdefault(message.failure.rank, message.failure)
            self._stop(self._what_failed())
        elif isinstance(message, messages.Bye):
            self._nodes.ended(node)
            self._check_all_ended()

    def on_lost(self, node: str, why: str) -> None:
        if not self._nodes.lost(node):
            return
        last_known = self._nodes.last_known(node)
        wrote = next((rank for rank in self._nodes.ranks_of(node) if rank in self._logs.last_lines), None)
        if last_known and wrote is not None:
            last_known += f", rank {wrote} wrote {self._logs.last_lines[wrote]!r}"
        self._lost.append(f"{self._nodes.describe(node)}: {why}{last_known}")
        self._stop(f"lost the node on {self._nodes.describe(node)}")
        self._check_all_ended()

    def _check_all_ended(self) -> None:
        """End the run soon after all its nodes are gone, if one of them is lost, without waiting for the Spark job."""
        if self._lost and self._nodes.all_gone:
            self._later(_LOST_MARGIN, self._end)

    def _what_failed(self) -> str:
        if not self._live_failures:
            return "a rank failed"
        root = order_failures(list(self._live_failures.values()))[0]
        return f"rank {root.rank} failed: {root.message}"

    def _check_stalled(self, node: str) -> None:
        limit = self._job.stall_timeout
        if limit is not None and self.status is Status.RUNNING and self._nodes.stalled(node, limit):
            threading.Thread(target=self._end_stalled, name="distributor-stall", daemon=True).start()

    def _end_stalled(self) -> None:
        stacks = self.dump_stacks(_STALL_ANSWER)
        if self.status is Status.RUNNING:
            self._stall = StallError(
                f"no rank wrote anything or used CPU time for stall_timeout={self._job.stall_timeout:g} s: {stacks}",
                stacks=stacks,
            )
            self._stop(str(self._stall).partition("\n")[0])

    def _advance(self, status: Status) -> None:
        with self._lock:
            if self._status in (Status.WAITING, Status.STARTING):
                self._status, self._status_since = status, time.monotonic()

    def _warn(self, warnings: Mapping[str, Sequence[str]]) -> None:
        """Log the nodes' warnings, each once per host.

        Args:
            warnings: the hosts by warning text, which completes the sentence "the node on HOST ...".
        """
        for text, hosts in warnings.items():
            if self._unreached and text.startswith(frames.UNREACHED):
                continue
            new = sorted({host for host in hosts if (host, text) not in self._warned})
            self._warned |= {(host, text) for host in new}
            if new:
                _log.warning("%s node on %s %s", "the" if len(new) == 1 else "each", ", ".join(new), text)

    def _note_report(self, collected: Collected) -> None:
        if self.placement is None:  # no node has reached the channel
            self._nodes.placement = next((report.placement for report in collected.reports if report.placement), None)
        for log in collected.logs:
            self._logs.take(log)
        warnings: dict[str, list[str]] = {}
        for report in collected.reports:
            for text in report.warnings:
                warnings.setdefault(text, []).append(report.host)
        self._warn(warnings)
        self._timings = timings.phases(self._submitted, collected, time.time())


def _tell_untold(untold: Sequence[str]) -> None:
    """Print why a run failed if nobody asked for its result, when its handle goes away or the program ends."""
    for text in untold:
        print(f"[distributor] {text}", file=sys.stderr)
