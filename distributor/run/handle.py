"""The driver's handle for one run."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributor.display.display import Display, make_logs
from distributor.display.snapshot import Snapshot, far
from distributor.display.view import View
from distributor.errors import DistributorError, RunCancelledError, TrainingError, show_shortly
from distributor.machine import versions
from distributor.metrics.ended import EndedAttempt
from distributor.metrics.goodput import Goodput
from distributor.metrics.table import Metrics, figure_of
from distributor.outcomes.driver_failures import typed
from distributor.outcomes.stacks import Stacks
from distributor.outcomes.verdict import Verdict
from distributor.run import events, state
from distributor.run.callback_thread import Callbacks
from distributor.run.interrupt import plain_interrupts
from distributor.run.margins import Margins
from distributor.run.preparing import Preparing
from distributor.run.submission import Resize
from distributor.run.supervisor import Feed, Supervisor
from distributor.schedulers.base import Scheduler
from distributor.text import notices
from distributor.text.wording import count
from distributor.values.checks import check_seconds
from distributor.values.job import Job, Status
from distributor.values.placement import Placement
from distributor.values.reports import Committed, Progress, Resumed
from distributor.values.trial_info import TrialInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: The runs of this process that have been started and have not ended, in order.
_active: dict[Run, None] = {}


def active_runs() -> list[Run]:
    """Return the handles of this process's runs that have not ended, the oldest first."""
    return list(_active)


def slots_are_wanted(*, on_driver: bool, beside: Sequence[Run] = ()) -> bool:
    """Return whether a run of this process, other than those, waits for slots that exist."""
    return any(run._wants_slots(on_driver=on_driver) for run in active_runs() if run not in beside)


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
        announce: bool = False,
        view: View | None = None,
        margins: Margins | None = None,
        callbacks: Sequence[Any] = (),
        resize: Resize | None = None,
        feed: Feed | None = None,
        arguments: Mapping[str, str | int | float | bool | None] | None = None,
        trial: TrialInfo | None = None,
    ) -> None:
        self.id = job.run_id
        #: The user's name for the run; ``None`` if it has no name.
        self.name = job.name
        #: The folder that receives every rank's whole output; ``None`` without ``log_dir``.
        self.log_folder = log_folder
        #: The arguments of the function, script or module that are plain values (texts, numbers, ``None``), by name.
        #: Texts that look like secrets, by words of their names such as ``token``, are left out.
        self.arguments: Mapping[str, str | int | float | bool | None] = dict(arguments or {})
        #: Which trial of a search the run is: ``number``, ``params``, ``study``; ``None`` outside of :func:`sweep`.
        self.trial = trial
        self._job = job
        margins = Margins() if margins is None else margins
        logs = make_logs(lambda rank: supervisor.state.nodes.host_of(rank), job.most_ranks, job.output, log_folder)
        self._display = Display(logs, view, announce=announce, look=self._look)
        self._supervisor = supervisor = Supervisor(
            job,
            scheduler,
            self._display,
            margins,
            resize,
            feed,
            self._join,
            contested=lambda: slots_are_wanted(on_driver=scheduler.on_driver),
        )
        self._callbacks = Callbacks(callbacks, f"run {job.label}", self._supervisor.reports.new)
        self._preparing = Preparing(margins)
        self._callers = _Callers()
        self._verdict = Verdict()
        self._times = _Times()
        self._life = _Life()

    def start(self, notes: Sequence[str] = ()) -> Run:
        """Start the run, after showing ``notes``, and return it.

        Raises:
            StartError: Spark's context was stopped, or no thread can be started.
        """
        weakref.finalize(self, _tell_untold, self._callers.untold)
        _active[self] = None
        self._times.submitted = time.time()
        try:
            self._display.open([f"run {self._job.label}: {note}" for note in notes])
            thread = self._supervisor.thread(self._execute)
            thread.daemon = True
            thread.start()
        except BaseException as error:  # such as Ctrl-C, when the thread may have started
            if not self.delete():
                self.cancel()
            if isinstance(error, Exception) and not isinstance(error, DistributorError):
                raise typed(error) from error
            raise
        self._display.follow()
        return self

    def delete(self) -> bool:
        """End the run before its thread executes it. If the thread has already begun, do nothing and return ``False``.

        If the thread that executes the run begins only after this call, the thread does nothing.
        """
        if not self._life.begin():
            return False
        self._verdict = Verdict(error=RunCancelledError(f"run {self._job.label} was interrupted before it began"))
        self._supervisor.end(self._verdict)
        self._display.close()
        self._end()
        return True

    def _end(self) -> None:
        _active.pop(self, None)
        self._life.done.set()

    @property
    def error(self) -> Exception | None:
        """Why the run has failed; ``None`` if it has not, or goes on. Unlike ``result()``, this raises nothing."""
        error = self._verdict.error
        return error if isinstance(error, Exception) else None

    @property
    def submitted(self) -> float:
        """When the run was submitted, in seconds since the epoch."""
        return self._times.submitted

    @property
    def ended(self) -> float | None:
        """When the run ended, in seconds since the epoch; ``None`` if it goes on."""
        return self._times.ended

    @property
    def training_folder(self) -> str | None:
        """The folder or URL for the checkpoints of a run with ``name=``; ``None`` without one, or until it is known.

        A run that continues an earlier one has the same folder.
        """
        job = self._current
        return None if job.checkpoints is None or job.fence is None or not job.fence.is_named else job.checkpoints.dir

    @property
    def last_checkpoint(self) -> Committed | None:
        """The last committed checkpoint, with its ``step`` and ``path``; ``None`` without one."""
        return self._supervisor.reports.last_committed

    def __repr__(self) -> str:
        progress = f", {far(self.progress)}" if self.progress is not None else ""
        return f"<Run {self._job.label}: {count(self.num_processes, 'process')}, {self.status.value}{progress}>"

    def _ipython_display_(self) -> None:
        """Show the live status in this notebook cell too; if impossible, make IPython show ``_repr_html_``."""
        if not self._display.show_again(self.snapshot()):
            raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return the run as HTML for a notebook."""
        from distributor.display import notebook

        return notebook.render(self.snapshot(), unfolded=True)

    @property
    def status(self) -> Status:
        """The current status of the run."""
        return self._supervisor.state.status

    @property
    def _reports_live(self) -> bool:
        """Whether nodes have reached the driver, so that reports come while ranks run."""
        server = self._supervisor.server
        return server is not None and server.reached

    @property
    def _halted(self) -> bool:
        """Whether ranks have stopped together, as ``stop`` asks."""
        return self._supervisor.state.stop_vote.halted

    def _wants_slots(self, *, on_driver: bool) -> bool:
        """Return whether the run waits for slots that exist, on this machine or on the cluster."""
        submission = self._supervisor.submission
        if submission.scheduler.on_driver != on_driver:
            return False
        return self._preparing.wants_slots(self._supervisor.state, submission)

    @property
    def _holds_slots(self) -> bool:
        """Whether the run has its slots, as far as is known; also once it has ended."""
        return self._preparing.holds_slots(self._supervisor.state, self._supervisor.submission)

    @property
    def _current(self) -> Job:
        """The current job of the run, or its last one."""
        return self._supervisor.submission.job

    @property
    def num_processes(self) -> int:
        """Number of processes of the current attempt; before the first attempt, the smallest allowed number."""
        return self._current.resources.num_processes

    @property
    def placement(self) -> Placement | None:
        """Which ranks run on which nodes; ``None`` until the first node of the current job has reported.

        Example:
            >>> print(run.placement)  # doctest: +SKIP
            node 0 on host-a (10.0.0.2): ranks 0-2; node 1 on host-b (10.0.0.3): rank 3
        """
        return self._supervisor.state.nodes.placement

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions on the driver of Python, this package, torch, PySpark, and what the launch path needs.

        Example:
            >>> run.versions  # doctest: +SKIP
            {'Python': '3.12.1', 'torch': '2.13.0', 'pyspark': '4.3.0', 'distributor': '0.1.0'}
        """
        import distributor

        return {**versions.here(["pyspark", *self._job.launch.needs]), "distributor": distributor.__version__}

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The final DeepSpeed configuration, with "auto" filled in where possible; ``None`` for a run without one."""
        config = self._current.launch.deepspeed_config
        return None if config is None else json.loads(config)

    @property
    def timings(self) -> dict[str, float]:
        """Duration of each phase in seconds, in the order of the phases; empty until the run has ended.

        It may stay empty if the run fails or is cancelled.

        ========  =====================================================================================
        schedule  until Spark has submitted the stage, including the wait for executors to come up
        worker    until the tasks run in their Python workers, including the wait for slots
        exchange  until all tasks have exchanged their addresses, GPUs and versions
        agent     until each node's agent is up, including torch's import by a new warm process
        import    until the launcher can fork, including its import of torch if there is no warm process
        fork      until the ranks are forked
        call      until the last rank has called the function, including the build of extensions
        function  until the last function has returned, including the setup of process groups
        exit      until all ranks have ended
        collect   until the return values are on the driver
        total     all phases together
        ========  =====================================================================================

        An agent is the process on a node that starts and watches the node's ranks. Its launcher is the process that
        forks the ranks. A warm process has imported torch, and waits for later runs, so that they start sooner.

        A phase ends when the last node or rank has ended it. Clocks of different hosts are compared without correction.
        In local mode, the phases ``schedule``, ``worker`` and ``exchange`` take no time. On Spark Connect, ``schedule``
        takes none, because ``worker`` includes it. If a run has submitted several jobs, for example because it lost
        nodes, the phases are those of the last job. If ranks were started again within a job, the phase ``import``
        includes the job's earlier attempts.
        """
        return dict(self._supervisor.timings)

    @property
    def attempts(self) -> tuple[EndedAttempt, ...]:
        """The attempts that have ended, each with its number, its duration in seconds and the reason for its end.

        Example:
            >>> [attempt.reason for attempt in run.attempts]  # doctest: +SKIP
            ['rank 1 failed: killed by SIGKILL', None]
        """
        return self._supervisor.reports.ended

    @property
    def goodput(self) -> Goodput:
        """How the run has spent its time so far: on training, waiting for slots, starting, saving, and so on.

        Example:
            >>> print(run.goodput)  # doctest: +SKIP
            81 % of 2 min 05 s in training; starting 12 s, saving 3.0 s, redoing 8.1 s
        """
        return self._supervisor.goodput

    @property
    def resumed_from(self) -> Resumed | None:
        """The checkpoint from which the latest attempt that called ``load_checkpoint`` continues; ``None`` without one.

        Example:
            >>> print(run.resumed_from)  # doctest: +SKIP
            continues from step 8 of /shared/run/step-8-3f2a-0-2, saved at 2026-11-02 10:31:07
            >>> run.resumed_from.step  # doctest: +SKIP
            8
        """
        resumed = self._supervisor.reports.resumed
        return None if resumed is None or resumed.step is None else resumed

    @property
    def metrics(self) -> Metrics:
        """What ranks have reported so far with ``runtime.report()``: rows with attempt, step, time, rank and values.

        Example:
            >>> run.metrics.to_pandas()  # doctest: +SKIP
            >>> [(row.step, row.values["loss"]) for row in run.metrics]  # doctest: +SKIP
            [(1, 0.5), (2, 0.25)]
        """
        return self._supervisor.reports.metrics

    @property
    def latest_metrics(self) -> dict[str, float]:
        """The newest value of each metric, by name, in the latest attempt in which a rank has reported.

        If several ranks report the same metric, the lowest rank's value counts.
        """
        return self._supervisor.reports.latest

    @property
    def progress(self) -> Progress | None:
        """The last reported step, the total number of steps, and steps per second; ``None`` if no rank reports steps.

        Example:
            >>> run.progress.seconds_left  # doctest: +SKIP
            71.5
        """
        return self._supervisor.reports.progress

    def plot(self) -> Figure:
        """Return a figure of the reported metrics, with their range over the ranks, and of where the time went.

        A notebook displays the figure as the value of a cell.

        Raises:
            ConfigurationError: matplotlib is not installed.

        Example:
            >>> run.plot().savefig("run.png")  # doctest: +SKIP
        """
        return figure_of(self.metrics, self.goodput)

    def snapshot(self) -> Snapshot:
        """Return the state of the run at this moment, such as its status, its placement and its progress.

        Example:
            >>> run.snapshot().ranks_up  # doctest: +SKIP
            4
        """
        current, now = self._supervisor.state, time.monotonic()
        phase = current.phase
        if isinstance(phase, state.Ended) and current is not self._supervisor.state:  # another attempt has just begun
            current = self._supervisor.state
            phase = current.phase
        detail, lasting = self._preparing.step(current, self._supervisor.submission)
        if isinstance(phase, state.Stopping):
            left = phase.grace - (now - phase.since)
            detail = phase.reason
            if left > 0 and self.placement is not None:
                detail += f"; ranks have {left:.0f} s left to save"
        return Snapshot(
            run_id=self.id,
            name=self.name,
            title=self._job.title,
            world_size=self._current.world_size,
            status=state.status_of(phase),
            seconds=self._times.seconds,
            since=now - phase.since,
            detail=detail,
            lasting=lasting,
            nodes_up=current.nodes.up,
            ranks_up=current.nodes.ranks_up,
            placement=self.placement,
            lines=dict(self._display.logs.last_lines),
            timings=self.timings,
            progress=self.progress,
            metrics=self.latest_metrics,
            error=self._verdict.error,
            raised=bool(self._callers.asking),
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended, for at most ``timeout`` seconds, and return whether it has.

        Ctrl-C ends only the wait. The run continues.
        """
        if self._callbacks.is_running_here:  # the run waits for this callback
            return self._life.decided.wait(timeout)
        try:
            try:
                with plain_interrupts(), self._callers.counted(self._callers.waiting):
                    return self._life.done.wait(timeout)
            finally:
                if not self._life.done.is_set() and not self._callers.waiting:
                    self._display.leave()
        except KeyboardInterrupt as interrupt:
            show_shortly(interrupt)
            interrupt.__traceback__ = None  # hides the frames of this package
            raise

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the run and return rank 0's return value; ``None`` for a script or a module.

        Args:
            timeout: maximum number of seconds to wait; ``None`` (default) waits without a limit.

        Raises:
            TimeoutError: the run has not ended within ``timeout``; it continues.
            TrainingError: a rank failed.
            NodeLostError: a node was lost.
            ResultError: the return value could not be brought back to the driver.
            StartError: the run could not start.
            RunCancelledError: the run was cancelled.
            ConfigurationError: the input is wrong, which was found only after the start.
            CompanionError, StallError, GroupError, PreemptionError, StopError: see each class.
        """
        self._await(timeout)
        return self._verdict.values.get(0)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for the run and return the return value of every rank of the last attempt, in rank order.

        Raises the errors of :meth:`result`.
        """
        self._await(timeout)
        return [self._verdict.values.get(rank) for rank in range(self._current.world_size)]

    def cancel(self, why: str = "cancelled", *, say_where: bool = False) -> None:
        """Stop all ranks with SIGTERM and, after ``grace_period`` seconds, SIGKILL.

        Returns at once; use ``wait`` to wait for the end. If the run is already stopping for another reason, such as
        the failure of a rank, that reason remains the run's error.

        Args:
            why: the reason for the end of the run, which the live status shows.
            say_where: log where in the code the ranks are (default: no). This helps a user who interrupts a hang. Ranks
                get a quarter of a second to report where they are before they are stopped.
        """
        if say_where:
            self._supervisor.say_where()
        self._supervisor.on(events.Cancel(why))
        self._leave_callbacks()

    def _leave_callbacks(self) -> bool:
        """Let a run whose result is known end before a callback that takes long; return whether there is one."""
        return self._life.decided.is_set() and self._callbacks.leave()

    def stop(self, timeout: float | None = None) -> None:
        """Ask all ranks to save and return. Returns at once; use ``result`` or ``wait`` to wait for the end.

        After this call, ``runtime.should_stop`` returns ``True`` on all ranks at the same step. The values that the
        ranks then return are the result of the run. If the current attempt fails after this call, no other attempt
        follows.

        Args:
            timeout: number of seconds after which the run is cancelled if it has not ended; with ``None`` (default), it
                is never cancelled. Ranks go on as before if they never call ``runtime.should_stop``, or if nodes cannot
                reach the driver.

        Raises:
            ConfigurationError: ``timeout`` is not a number of seconds.

        Example:
            >>> run.stop(timeout=60)  # doctest: +SKIP
            >>> run.result()  # doctest: +SKIP
        """
        self._supervisor.halt(None if timeout is None else check_seconds("timeout", timeout, 0.0))

    def terminate(self, *, say_where: bool = False) -> None:
        """End the run as SIGTERM to its nodes does. Returns at once; use ``wait`` to wait for the end.

        Ranks that call ``runtime.should_stop`` stop together at one step, as after :meth:`stop`. Others get SIGTERM.
        Ranks that have not ended after ``grace_period`` seconds are killed. No other attempt follows.

        Args:
            say_where: as for :meth:`cancel`.
        """
        if say_where:
            self._supervisor.say_where()
        self._supervisor.on(events.DriverTerminated())

    def kill(self) -> None:
        """Kill all ranks without a grace period, even if a grace period has already begun. Returns at once.

        A node that the driver cannot reach is stopped through Spark, and its ranks still get ``grace_period`` seconds.
        """
        self._supervisor.on(events.Kill())

    def dump_stacks(self, timeout: float = 10.0, *, all_threads: bool = True) -> Stacks:
        """Return what every rank is doing now: the Python stacks of its threads, by rank.

        Ranks keep running, whether they compute, wait in a collective or hang. The text of a rank that cannot
        answer says why. The result is empty before ranks are up, after the run has ended, and if no node can reach
        the driver.

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
        return self._supervisor.dump_stacks(timeout, all_threads=all_threads)

    def _await(self, timeout: float | None) -> None:
        with self._callers.counted(self._callers.asking):
            ended = self.wait(timeout)
        if not ended:
            raise TimeoutError(f"run {self._job.label} has not ended within {timeout} s; it is {self.status.value}")
        self._callers.untold.clear()
        error = self._verdict.error
        if isinstance(error, DistributorError):
            raise error.with_traceback(None)  # hides the frames of this package
        if error is not None:
            raise error

    def _look(self) -> tuple[Snapshot, bool]:
        return self.snapshot(), bool(self._callers.waiting)

    def _execute(self) -> None:
        """Run the job to its end, in a thread of its own."""
        if not self._life.begin():
            return
        try:
            self._callbacks.start(self)
            self._verdict = self._supervisor.run(self._times.submitted)
        except BaseException as error:
            self._verdict = Verdict(error=typed(error))
        finally:
            self._times.ended = time.time()
            consequent = self._supervisor.consequent()  # known until the attempt has ended
            try:
                self._supervisor.end(self._verdict)
                self._display.look()
                self._display.logs.flush()  # callbacks may read the files
                notices.flush()
                self._life.decided.set()
                self._callbacks.close()
                self._tell_end(consequent)
            finally:
                self._display.close()
                self._end()

    def _join(self, job: Job, wanted: Callable[[], bool]) -> Job:
        """Return the job with the id of the run in MLflow that rank 0 joins, if it has the server of a callback."""
        if job.tracked is None:
            return job
        inherited = os.environ if self._supervisor.submission.scheduler.on_driver else {}
        return replace(job, tracked=self._callbacks.run_for_ranks(self, {**inherited, **job.env}, wanted))

    def _tell_end(self, consequent: Sequence[int]) -> None:
        """Print in one line why the run failed, unless a waiting caller gets the error or the view shows it."""
        error = self._verdict.error
        failures = error.failures if isinstance(error, TrainingError) else ()
        shown = [failure.rank for failure in failures if failure.traceback]
        self._display.logs.release([*shown, *consequent])
        if error is None or isinstance(error, RunCancelledError):
            return
        self._callers.untold.append(f"run {self._job.label} has failed, and no caller has received the error: {error}")
        if not self._callers.asking and self._display.announces:
            what = str(error).partition("\n")[0]
            self._display.logs.note(f"run {self._job.label} has failed: {what} (result() raises the full error)")


@dataclass
class _Callers:
    """The callers that wait for a run."""

    waiting: list[object] = field(default_factory=list)  # for the run's end
    asking: list[object] = field(default_factory=list)  # for its result or exception
    untold: list[str] = field(default_factory=list)  # why the run failed, until a caller gets the error

    @staticmethod
    @contextmanager
    def counted(callers: list[object]) -> Iterator[None]:
        """Keep an entry in ``callers`` while a caller waits. Take no lock: Ctrl-C could prevent its release."""
        caller = object()
        callers.append(caller)
        try:
            yield
        finally:
            callers.remove(caller)


@dataclass
class _Life:
    """Whether a run has begun or was withdrawn, whether its result is known, and whether it is over."""

    decided: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Return ``True`` to the first caller only: the thread that executes the run, or one that withdraws it."""
        return self.lock.acquire(blocking=False)


@dataclass
class _Times:
    """When a run was submitted and when it ended, in seconds since the epoch."""

    submitted: float = field(default_factory=time.time)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the run was submitted; once it has ended, the seconds that it took."""
        return max(0.0, (self.ended or time.time()) - self.submitted)


def _tell_untold(untold: Sequence[str]) -> None:
    """Print why a run failed, if no caller got the error. Called when the run's handle is deleted or Python exits."""
    for text in untold:
        print(f"[distributor] {text}", file=sys.stderr)
