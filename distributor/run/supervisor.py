"""Makes the attempts of a run, in one job or several, and decides how the run has ended."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

from distributor.channel.server import LATER_FACTS_TIMEOUT, ChannelServer
from distributor.channel.tls import make_peer_key
from distributor.channel.validation import Validation
from distributor.display.display import Display
from distributor.errors import NodeLostError, PreemptionError, RunCancelledError
from distributor.metrics.driver import NodeSample, Reports
from distributor.metrics.ended import add_history
from distributor.metrics.goodput import Goodput, goodput
from distributor.outcomes import advice, timings
from distributor.outcomes.causes import Cancelled, Cause, NodeLost, Preempted, Stalled, StartTimeout
from distributor.outcomes.failures import consequent
from distributor.outcomes.stacks import Stacks, summary
from distributor.outcomes.verdict import Verdict, failures_of, verdict
from distributor.output.sink import OutputSink, held_now, keep
from distributor.run import events, state
from distributor.run.alarm import Alarm
from distributor.run.attempt import Attempt
from distributor.run.avoided_hosts import blamed, hosts_to_avoid
from distributor.run.events import Event
from distributor.run.lease import Lease, hold
from distributor.run.margins import Margins
from distributor.run.nodes import Nodes
from distributor.run.restart_policy import again, again_in_new_job, is_stuck
from distributor.run.stack_dump import Dumps
from distributor.run.state import AttemptState
from distributor.run.submission import Resize, Submission
from distributor.schedulers.base import Scheduler
from distributor.text import escapes, notices
from distributor.values import messages
from distributor.values.job import Job, Status
from distributor.values.messages import Dump, Message, Offset
from distributor.values.outcome import REPORTS, Collected, Failure, Log
from distributor.values.reports import Resumed

_log = notices.logger

#: Writes a run's data for the length of a ``with`` block, while it is wanted, and adds their places to the job.
Feed = Callable[[Job, Callable[[], bool]], AbstractContextManager[Job]]

#: Returns the job with what its ranks must know of the run's tracking; waits for it only shortly, while it is wanted.
Join = Callable[[Job, Callable[[], bool]], Job]


class Supervisor:
    """Runs a job to its end, and submits a new job if the run can continue in another one."""

    def __init__(
        self,
        job: Job,
        scheduler: Scheduler,
        display: Display,
        margins: Margins,
        resize: Resize | None = None,
        feed: Feed | None = None,
        join: Join | None = None,
        contested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.timings: dict[str, float] = {}  # seconds of each phase; empty until the job has ended
        self.reports = Reports(job.world_size, job.recovery.max_restarts + 1)
        self._display = display
        self._margins = margins
        self._feed = feed
        self._join = join
        self._alarm = Alarm()
        self._dumps = Dumps(lambda: self._job.world_size)
        self._held_lease: Lease | None = None  # of the run's name; None until the run has acquired it
        self._has_reached = False  # whether nodes of an earlier job have reached the driver
        self._stuck = False  # whether the run ends because its last attempts made no progress
        self._output_at = -math.inf  # when output of ranks last arrived, on the monotonic clock
        self._where: Dump | None = None  # the request for stacks that are shown when the user interrupts the run
        self._stalling: Dump | None = None  # the request for the stacks of a run that seems to stall
        self.submission = Submission(job, scheduler, self._alarm, margins, resize, contested)
        self.attempt = self._make_attempt(Nodes(), 0)

    def _make_attempt(self, nodes: Nodes, number: int) -> Attempt:
        current = AttemptState(self._job, time.monotonic(), self._margins, nodes, number)
        return Attempt(current, self.submission, self, self._alarm, self._display)

    @property
    def _job(self) -> Job:
        return self.submission.job

    @property
    def server(self) -> ChannelServer | None:
        """The channel to the current job's nodes; ``None`` until it is open."""
        return self.submission.server

    @property
    def state(self) -> AttemptState:
        return self.attempt.state

    def on(self, event: Event) -> None:
        """Report an event to the current attempt."""
        attempt = self.attempt
        while not attempt.on(event) and attempt is not self.attempt:  # another attempt has just begun
            attempt = self.attempt

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a new thread for ``target``, which calls :meth:`run`."""
        return self.submission.scheduler.thread(target)

    def run(self, submitted: float) -> Verdict:
        """Run the job, and further ones while they may succeed. ``submitted`` is in seconds since the epoch."""
        try:
            self._alarm.start()
            with hold(self._job, self._goes_on, self._displace) as held_lease:
                self._held_lease, self.submission.job = held_lease, _with_peers(held_lease.job)
                with self._fed(), keep(self._job) as output_sink:
                    if self._join is not None:
                        self.submission.job = self._join(self._job, self._goes_on)
                    result = self._run_jobs(submitted, output_sink)
                held_lease.release(finished=result.error is None and not self.state.stop_vote.halted)
        except BaseException as error:
            result = self._judge(None, error)
        if result.error is not None:
            add_history(result.error, self.reports.ended, stuck=self._stuck)
        return result

    @contextmanager
    def _fed(self) -> Iterator[None]:
        """Bring the run's data to its nodes during the ``with`` block."""
        if self._feed is None:
            yield
            return
        self.submission.feeding = True
        with self._feed(self._job, self._goes_on) as self.submission.job:
            self.submission.feeding = False
            yield

    def _goes_on(self) -> bool:
        """Whether the run is still wanted, as it is after ``run.stop()``: its ranks stop later."""
        return isinstance(self.state.wish, events.Halt | None)

    def _displace(self, by: str) -> None:
        """End the run, because another run has taken its name."""
        self.on(events.Cancel(by, by))

    def _run_jobs(self, submitted: float, output_sink: OutputSink | None) -> Verdict:
        channels = ExitStack()  # of ended jobs, whose nodes keep ranks' states in memory for the next job
        try:
            while True:
                result = self._run_job(submitted, output_sink, channels)
                if not self._submits_again(result.error):
                    wished = isinstance(result.error, PreemptionError) and isinstance(self.state.wish, events.Halt)
                    return Verdict(result.values) if wished else result
                submitted = time.time()
        finally:
            channels.close()
            for warning in [*([] if output_sink is None else output_sink.warnings), *self._warnings_of_saves()]:
                _log.warning("run %s: %s", self._job.label, warning)

    def _warnings_of_saves(self) -> list[str]:
        unsaved, last = self.reports.unsaved, self.reports.last_committed
        if unsaved is None:
            return []
        kept = "no checkpoint" if last is None else f"the checkpoint of step {last.step}, {last.path}, as its last one"
        return [f"the last save failed, at step {unsaved.step}, so the run leaves {kept}: {escapes.plain(unsaved.why)}"]

    def _run_job(self, submitted: float, output_sink: OutputSink | None, channels: ExitStack) -> Verdict:
        submission = self.submission
        if output_sink is not None:
            output_sink.begin()
        try:
            self.attempt.begin()
            submission.fit(lambda: self.state.cause is None)
            self.state.fit(submission.job)
            self.reports.fit(submission.job.world_size)
            with self._channel(output_sink, channels) as submission.server:
                over = isinstance(self.state.cause, Cancelled | StartTimeout)
                collected = Collected() if over else submission.run(submission.server)
                result = self._judge(collected, None)
                self._note(collected, submitted)
            if output_sink is not None:
                output_sink.settle(collected.files)
            return result
        except BaseException as error:
            return self._judge(None, error)

    @contextmanager
    def _channel(self, output_sink: OutputSink | None, channels: ExitStack) -> Iterator[ChannelServer]:
        """Open the channel to the nodes of the current job, until the job ends.

        If nodes keep states of their ranks in memory for the next job, they remove these when the channel closes. Then
        ``channels`` closes it, at the run's end.
        """
        timeout, tasks = self._job.deadlines.heartbeat_timeout, self._job.num_tasks
        with ExitStack() as own:
            patience = LATER_FACTS_TIMEOUT if self._has_reached else None
            server = own.enter_context(ChannelServer(self, timeout, tasks, self._guard(), output_sink, patience))
            try:
                yield server
            finally:
                self._has_reached = self._has_reached or server.reached
                if self._job.peers is not None:
                    server.retire()
                    channels.push(own.pop_all())

    def _submits_again(self, error: BaseException | None) -> bool:
        """Return whether a new job follows the ended one. If so, make it current, with its first attempt."""
        ended = self.attempt
        current, number = ended.state, ended.state.number + 1
        recovery = self._job.recovery
        widens, excused = current.stop_vote.widens, self._job.excused
        follows = error is not None and again_in_new_job(
            error, current.number, recovery, widens=widens, excused=excused
        )
        if current.wish is not None or not follows or self._gives_up():
            return False
        why = current.reason if isinstance(current.cause, NodeLost) else str(error).partition("\n")[0]
        if isinstance(error, PreemptionError):  # a preemption does not count as a restart
            recovery = replace(recovery, max_restarts=recovery.max_restarts + 1)
            excused += 1
            self.reports.expect_another()
        try:
            held = held_now(self._job.output_dir)
            avoided = hosts_to_avoid([*(each.executor for each in self.reports.ended), _blamed(current)])
            job = replace(
                self._job, attempt=number, recovery=recovery, excused=excused, output_dir=held, avoided=avoided
            )
            job = job if self._held_lease is None else self._held_lease.advance(job)
            submission = self.submission.following(job, wider=widens)
        except Exception as failed:  # for example, Spark's context has just been stopped
            _log.warning("run %s: cannot start again in a new job: %s", self._job.label, failed)
            return False
        self._leave(current, "starting again in a new job", why, counts=recovery is self._job.recovery)
        self._display.logs.begin_again()
        self.reports.begin_again()
        self.submission, self.timings = submission, {}
        self._follow(ended, self._make_attempt(Nodes(current.nodes.placement), number))
        self._cancel_too(current)
        return True

    def _leave(self, ended: AttemptState, what: str, why: str, *, counts: bool = True) -> None:
        """Log that another attempt follows, and record the end of this one."""
        limit = f" (restart {ended.number + 1} of at most {self._job.recovery.max_restarts})" if counts else ""
        notices.soon(notices.warn, f"run {self._job.label}: {what}{limit}: {why}")
        self._display.logs.release(self.consequent())
        self._end_attempt(why)

    def consequent(self) -> list[int]:
        """Return the ranks that the current attempt has lost because of another failure."""
        return consequent(failures_of(self.state.cause, self.state.failures))

    def _follow(self, ended: Attempt, following: Attempt) -> None:
        """Make ``following`` the current attempt, and let ``ended`` count as failed."""
        self.attempt = following
        ended.on(events.JobEnded(Status.FAILED))

    def _cancel_too(self, ended: AttemptState) -> None:
        """Pass on to the new attempt a request to end the run that came just before."""
        if ended.wish is not None:
            self.on(ended.wish)

    def _guard(self) -> Validation:
        return Validation(
            self._job.label,
            self._job.num_tasks,
            self._job.world_size,
            self._received,
        )

    def end(self, result: Verdict) -> None:
        """Stop all activity: the run has ended with this verdict."""
        self._end_attempt(None if result.error is None else str(result.error))
        self.on(events.JobEnded(result.status))
        self._alarm.close()
        self._dumps.close()
        self._tell_where()

    def _gives_up(self) -> bool:
        """Return whether the last attempts made no progress. Unless a node has reached the driver, nobody knows."""
        reached = self.server is not None and self.server.reached
        number, ended = self.state.number, self.reports.ended
        killed = {each.number for each in ended if each.executor is not None}
        killed |= set() if _blamed(self.state) is None else {number}
        courses = self.reports.courses(number)
        steps, saved = [course.step for course in courses], [course.saved for course in courses]
        self._stuck = reached and is_stuck(steps, killed, saved)
        return self._stuck

    def _end_attempt(self, why: str | None) -> None:
        current, line = self.state, None if why is None else why.partition("\n")[0]
        executor = None if why is None else _blamed(current)
        self.reports.end_attempt(current.number, line, self._goodput(current), executor)

    @property
    def goodput(self) -> Goodput:
        current, ended = self.state, self.reports.ended
        now = Goodput() if any(each.number == current.number for each in ended) else self._goodput(current)
        return sum((each.goodput for each in ended), now)

    def _goodput(self, current: AttemptState) -> Goodput:
        stall = current.cause.limit if isinstance(current.cause, Stalled) else 0.0
        return goodput(current.moments, self.reports.course(current.number), time.monotonic(), stall=stall)

    def _judge(self, collected: Collected | None, error: BaseException | None) -> Verdict:
        cause: Cause | None = self.state.cause
        judged = verdict(
            cause,
            collected,
            error,
            label=self._job.label,
            world_size=self._job.world_size,
            advise=self._advise,
            local=self.submission.scheduler.on_driver,
            preempted=self._preempted(),
        )
        if self.state.terminated and isinstance(judged.error, NodeLostError):  # its ranks were told to end
            return Verdict(error=RunCancelledError(f"run {self._job.label} was cancelled: its driver got SIGTERM"))
        return judged

    def _preempted(self) -> Preempted | None:
        """Return why ranks stopped together; ``None`` if the user asked them to."""
        current = self.state
        if isinstance(current.wish, events.Halt):
            return None
        last = self.reports.last_committed
        kept = (
            "This run has committed no checkpoint"
            if last is None
            else f"The last checkpoint is of step {last.step}, in {last.path}"
        )
        return Preempted(current.stop_vote.preempted, kept, current.stop_vote.widens)

    def _advise(self, failure: Failure) -> str:
        try:
            return advice.advise(failure, self._job, local=self.submission.scheduler.on_driver)
        except Exception as error:  # the search for modules calls third-party import finders, which may raise anything
            _log.debug("no advice for run %s: %s", self._job.label, error)
            return ""

    def _note(self, collected: Collected, submitted: float) -> None:
        """Record what the job has returned besides results."""
        for log in collected.logs:
            self.on_log(log)
        self.on(events.Returned(collected))
        self.timings = timings.phases(submitted, collected, time.time())

    def halt(self, timeout: float | None) -> None:
        """Ask all ranks to stop together. Cancel the run if it has not ended after ``timeout`` seconds."""
        self.on(events.Halt())
        if timeout is not None:
            late = f"its ranks had not ended {timeout:g} s after run.stop()"
            self._alarm.after(timeout, lambda: self.on(events.Cancel(late, late)))

    # Requests for the ranks' stacks.

    def dump_stacks(self, timeout: float, *, all_threads: bool) -> Stacks:
        """Return what every rank is doing now; empty unless ranks are running."""
        request = self._ask(timeout, all_threads=all_threads)
        return Stacks({}) if request is None else self._dumps.wait(request, timeout + self._margins.transfer)

    def say_where(self) -> None:
        """Log a summary of the ranks' stacks later. The caller, which cancels the run, can stop the ranks at once."""
        patience = self._margins.last_words
        self._where = self._ask(patience, all_threads=False, then=self._tell_where)
        self._alarm.after(patience + self._margins.transfer, self._tell_where)

    def _tell_where(self) -> None:
        stacks = None if self._where is None else self._dumps.take(self._where)
        if stacks is not None:
            self._display.logs.note(f"run {self._job.label}: interrupted; {summary(stacks)}")

    def _ask(self, timeout: float, *, all_threads: bool, then: Callable[[], object] = lambda: None) -> Dump | None:
        """Ask all ranks for their stacks; ``None`` if none are running."""
        if self.server is None or isinstance(self.state.phase, state.Ended) or not self.state.nodes.up:
            return None
        request = self._dumps.ask(timeout, all_threads=all_threads, then=then)
        self.submission.order(request)
        return request

    # The methods of distributor.run.attempt.Line.

    def ask_stacks(self, then: Callable[[Event], object]) -> None:
        if self._stalling is not None:
            return  # an earlier request still waits for answers
        patience = self._margins.stall_answer

        def report() -> None:
            self._stalling = None
            stacks = None if request is None else self._dumps.take(request)
            if stacks is not None:
                then(events.Stood(stacks))

        request = self._stalling = self._ask(patience, all_threads=True, then=lambda: self._alarm.after(0.0, report))
        if request is not None:
            self._alarm.after(patience + self._margins.transfer, report)

    def rest(self, port: int | None) -> None:
        ended, server = self.attempt, self.server
        current = ended.state
        assert server is not None
        recovery = self._job.recovery
        follows = again(current.cause, current.failures, current.number, recovery)
        if port is None or current.wish is not None or not follows or self._gives_up():
            server.end()
            return
        number = current.number + 1
        self._leave(current, "restarting its ranks", current.reason)
        current.nodes.again()
        following = self._make_attempt(current.nodes, number)
        server.begin(number, port)  # before `following` can order a stop, which this order would revoke
        self._follow(ended, following)
        following.begin()
        self._cancel_too(current)

    def quiet(self) -> float:
        return time.monotonic() - self._output_at

    # The methods of distributor.channel.server.Listener, called in the channel's thread.

    def on_log(self, log: Log) -> None:
        self._output_at = time.monotonic()
        if log.stream != REPORTS:
            self._display.logs.take(log)
            return
        for text in self.reports.take(log):
            if isinstance(text, Resumed):
                notices.soon(notices.inform, f"run {self._job.label}: {escapes.plain(str(text))}")
            else:
                notices.soon(notices.warn, f"run {self._job.label}: {text}")

    def offsets(self, node: str) -> tuple[Offset, ...]:
        ranks = self.state.nodes.ranks_of(node)
        return self._display.logs.offsets(ranks) + self.reports.offsets(ranks)

    def _received(self, rank: int, stream: int) -> int:
        return self.reports.received(rank) if stream == REPORTS else self._display.logs.received(rank, stream)

    def on_message(self, node: str, message: Message) -> None:
        if isinstance(message, messages.StackDump):
            self._dumps.answer(message)
        elif isinstance(message, messages.Skipped):
            self._display.logs.skip(message.rank, message.stream, message.lines, message.offset)
        elif isinstance(message, messages.Halted):
            self.reports.reached(message.attempt, message.step)
        elif isinstance(message, messages.SystemMetrics) and (sender := self.state.nodes.node(node)) is not None:
            self.reports.add_sample(NodeSample(sender.node_rank, message.time, message.values))
        if isinstance(message, messages.Failed) and message.failure is not None:
            message = replace(message, failure=replace(message.failure, time=time.time() - message.age))
        self.on(events.Heard(node, message))

    def on_lost(self, node: str, why: str) -> None:
        self.on(events.Lost(node, why, self._display.logs.last_lines))


def _blamed(current: AttemptState) -> str | None:
    return blamed(current.nodes, failures_of(current.cause, current.failures))


def _with_peers(job: Job) -> Job:
    """Add a key for connections between nodes, if these exchange copies of the ranks' states."""
    replicates = job.checkpoints is not None and job.checkpoints.replicate
    return replace(job, peers=make_peer_key()) if replicates else job
