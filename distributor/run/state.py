"""The state of one attempt: an event goes in, and the actions to perform come out.

Pure: nothing here waits, asks for the time, or touches a thread, a process or a socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distributor.channel import frames
from distributor.metrics.goodput import Moments
from distributor.outcomes.causes import (
    Cancelled,
    Cause,
    Disagreed,
    NodeLost,
    RankFailed,
    Stalled,
    StartTimeout,
    Unfit,
    joined,
)
from distributor.outcomes.failures import order_failures
from distributor.outcomes.stacks import Stacks
from distributor.outcomes.verdict import failures_of
from distributor.run.events import (
    Action,
    Announce,
    Arm,
    Asked,
    AskLeaving,
    AskRoom,
    AskScheduler,
    AskStacks,
    AtRest,
    Cancel,
    Deadline,
    DriverTerminated,
    Due,
    EndJob,
    Event,
    Halt,
    Heard,
    JobEnded,
    Kill,
    Leaving,
    Lost,
    Returned,
    Room,
    Stood,
    StopRanks,
    TellNodes,
    Warn,
)
from distributor.run.margins import Margins
from distributor.run.nodes import Nodes
from distributor.run.restart_policy import leaves_doubt, surely_again
from distributor.stopping.driver import CoordinatedStop
from distributor.text.wording import alone, who
from distributor.values import messages
from distributor.values.echoes import is_echo
from distributor.values.job import Job, Status, StatusDetail
from distributor.values.messages import Message
from distributor.values.outcome import Collected, Failure
from distributor.values.placement import Placement

# The phases of an attempt. ``since`` is when the phase began, in seconds on the caller's clock.


@dataclass(frozen=True)
class Waiting:
    """The attempt waits for slots and for its nodes to come up."""

    since: float


@dataclass(frozen=True)
class Starting:
    """A node has reported the placement; the ranks are starting."""

    since: float


@dataclass(frozen=True)
class Running:
    """The ranks of all nodes are up."""

    since: float


@dataclass(frozen=True)
class Stopping:
    """The ranks are being stopped. From ``since`` on, they have ``grace`` seconds to end. ``reason`` is for users."""

    since: float
    cause: Cause
    reason: str
    grace: float


@dataclass(frozen=True)
class Ended:
    """The attempt has ended."""

    since: float
    status: Status


Phase = Waiting | Starting | Running | Stopping | Ended


_ALIVE = (Waiting, Starting, Running)


def status_of(phase: Phase) -> Status:
    """Return the status that users see in a phase."""
    return phase.status if isinstance(phase, Ended) else Status[type(phase).__name__.upper()]


_TASK_ENDED = "its Spark task ended: the Python worker or the executor was killed, or the job was cancelled"


class AttemptState:
    """The state of one attempt. All times are in seconds by one clock."""

    def __init__(
        self, job: Job, now: float, margins: Margins | None = None, nodes: Nodes | None = None, number: int = 0
    ) -> None:
        self.number = number
        self.moments = Moments(now)  # when each phase began
        self.nodes = Nodes() if nodes is None else nodes
        self.phase: Phase = Waiting(now)
        if self.nodes.placement is not None:  # they have already made an attempt
            self._enter(Starting(now))
        #: The request to end the run, kept even if it stops for another reason, so that no other attempt follows.
        self.wish: Cancel | Kill | Halt | None = None
        self.terminated = False  # the driver got SIGTERM
        self.stop_vote = CoordinatedStop(number)
        self.unreached = False  # the user was warned that no node reaches the driver, and none has since
        self.failures: list[Failure] = []  # those that nodes report at the attempt's end
        self._job = job
        self._margins = Margins() if margins is None else margins
        self._tasks_since: float | None = None
        self._again = False  # another attempt certainly follows, whatever else is reported
        self._doubt = False  # that is never certain, because of what was reported
        self._failed: set[int] = set()  # ranks whose failures were reported
        self._decided = False  # the resting nodes were told how it goes on
        self._unexplained: tuple[Failure, ...] = ()  # broken connections between ranks, with no cause so far

    @property
    def killed(self) -> bool:
        """Whether the user wants the run to end at once, even if nodes are still copying files."""
        return isinstance(self.wish, Kill)

    @property
    def reason(self) -> str:
        """Why the attempt failed, in words: the failure that caused all others, even if it was reported later."""
        known = failures_of(self.cause, self.failures) or self._unexplained
        if isinstance(self.cause, RankFailed | None) and known:
            root = order_failures(known)[0]
            return f"rank {root.rank} failed: {root.message}"
        return self.phase.reason if isinstance(self.phase, Stopping) else "its ranks ended, and none reported why"

    def begin(self) -> list[Action]:
        start = Arm(Deadline.START, self._job.deadlines.start_timeout)
        new = self.nodes.placement is None
        return [start, Arm(Deadline.REACH, self._margins.look)] if new else [start]

    @property
    def cause(self) -> Cause | None:
        """Why the attempt is being stopped; ``None`` if it is not."""
        return self.phase.cause if isinstance(self.phase, Stopping) else None

    @property
    def status(self) -> Status:
        return status_of(self.phase)

    def on(self, event: Event, now: float) -> list[Action]:
        """Note an event and return the actions to perform, in order."""
        if isinstance(self.phase, Ended):
            return []
        match event:
            case Heard():
                return self._on_message(event.node, event.message, now)
            case Lost():
                return self._on_lost(event, now)
            case Cancel():
                return self._on_cancel(event, now)
            case Kill():
                return self._on_kill(now)
            case Halt():
                return self._on_halt()
            case DriverTerminated():
                return self._on_terminate(now)
            case Due():
                return self._on_due(event, now)
            case Asked(deadline=Deadline.START):
                return [] if event.step is None else self._late(event.step, now)
            case Asked():
                return self._on_reach(event, now)
            case Room():
                return self._on_room(event.ranks)
            case Leaving():
                return self._on_leaving(event.host)
            case Stood():
                return self._on_stood(event.stacks, now)
            case Returned():
                return self._on_returned(event.collected)
            case JobEnded():
                self.phase = Ended(now, event.status)
        return []

    def _on_message(self, node: str, message: Message, now: float) -> list[Action]:
        nodes = self.nodes
        if isinstance(message, messages.Importing):
            nodes.importing(node, message.module, message.nodes)
            return []
        if isinstance(message, messages.Hello | messages.AllNodes):
            nodes.arrived(node, now)
            return self._on_placement(node, message, now) if isinstance(message, messages.AllNodes) else []
        nodes.heard(node, now)
        if isinstance(message, messages.AttemptMessage) and message.attempt != self.number:
            return []
        match message:
            case messages.Started():
                nodes.started(node)
                return self._if_all_up(now)
            case messages.Beat():
                nodes.beat(node, message.alive, message.idle)
                limit = self._job.deadlines.stall_timeout
                if limit is not None and isinstance(self.phase, Running) and nodes.stalled(node, limit):
                    return [AskStacks()]
            case messages.Warnings():
                return self._warn({text: [message.host] for text in message.texts})
            case messages.UnfitNode(host=host, why=why):
                return self._stop(Unfit(host, why), f"the node on {host} cannot start", now)
            case messages.Dead():
                return self._on_lost(Lost(node, "its agent died"), now)
            case messages.Orphaned(lives=True):
                nodes.task_lost(node)
            case messages.Orphaned():
                return self._on_lost(Lost(node, _TASK_ENDED), now)
            case messages.Failed():
                return self._on_failed(message.failure, now)
            case messages.RankPreempted() | messages.Reached() | messages.Halted():
                return self._on_node_stop(node, message, now)
            case messages.Keeping():
                nodes.keeps(node, message.bringing)
            case messages.Stopped():
                return self._on_stopped(node, message)
            case messages.Bye():
                nodes.ended(node)
                return [*self._if_all_gone(), *self._if_all_rest()]
        return []

    def _if_all_up(self, now: float) -> list[Action]:
        if not self.nodes.all_up or not isinstance(self.phase, (Waiting, Starting)):
            return []
        self._enter(Running(now))
        return [*self._agree(), *self._look_for_room(), *self._look_for_leaving()]

    def fit(self, job: Job) -> None:
        """Replace the job by the same job with its final number of ranks."""
        self._job = job

    def _enter(self, phase: Starting | Running | Stopping) -> None:
        self.phase = phase
        setattr(self.moments, type(phase).__name__.lower(), phase.since)

    def _look_for_room(self) -> list[Action]:
        widths = self._job.widths
        may = widths is not None and self._job.resources.num_processes < widths.most
        return [Arm(Deadline.WIDEN, self._margins.widen)] if may and not self.stop_vote.begun else []

    def _look_for_leaving(self) -> list[Action]:
        return [] if self.stop_vote.begun else [Arm(Deadline.LEAVE, self._margins.look)]

    def _on_leaving(self, host: str | None) -> list[Action]:
        if host is None:
            return self._look_for_leaving()
        self.stop_vote.preempt(f"Spark is about to end the executor on {host}")
        return self._agree()

    def _on_room(self, ranks: int) -> list[Action]:
        """Ask all ranks to stop together if a new job of this run could have more ranks."""
        now = self._job.resources.num_processes
        if not ranks or self.stop_vote.begun or self.wish is not None:
            return self._look_for_room()
        self.stop_vote.preempt(f"there are slots for {now + ranks} ranks instead of {now}", widens=True)
        return self._agree()

    def _on_stopped(self, node: str, stopped: messages.Stopped) -> list[Action]:
        self.failures += [outcome.failure for outcome in stopped.outcomes if outcome.failure is not None]
        self.nodes.rests(node, stopped.port, unable=stopped.error is not None)
        return self._if_all_rest()

    def _on_placement(self, node: str, placed: messages.AllNodes, now: float) -> list[Action]:
        """Note which rank runs where, once ``node`` is the first to connect."""
        if self.nodes.placement is not None:
            return []
        self.nodes.placement = Placement(placed.nodes)
        actions: list[Action] = []
        if self.unreached:
            self.unreached = False
            text = f"the node on {self.nodes.describe(node)} has now reached the driver: its log lines follow"
            actions = [Warn(f"run {self._job.label}: {text}")]
        if isinstance(self.phase, Waiting):
            self._enter(Starting(now))
        return [*actions, Announce(f"run {self._job.label}: {self.nodes}")]

    def _on_failed(self, failure: Failure | None, now: float) -> list[Action]:
        if failure is None:
            return self._stop(RankFailed(), "a rank failed", now)
        if failure.rank in self._failed:  # told again, after a break of the connection
            return []
        self._failed.add(failure.rank)
        if is_echo(failure) and isinstance(self.phase, _ALIVE):
            self._unexplained += (failure,)
            return [Arm(Deadline.BLAME, self._margins.blame)] if len(self._unexplained) == 1 else []
        return self._blame((failure,), now)

    def _blame(self, failures: tuple[Failure, ...], now: float) -> list[Action]:
        if isinstance(self.phase, Stopping):
            return self._stop(RankFailed(failures), self.phase.reason, now)
        root = order_failures([*self._unexplained, *failures])[0]
        return self._stop(RankFailed(failures), f"rank {root.rank} failed: {root.message}", now)

    def _on_lost(self, lost: Lost, now: float) -> list[Action]:
        nodes = self.nodes
        if not nodes.lost(lost.node):
            return []
        # Spark ends all tasks when it loses one. So a node that lost its task earlier may be the cause: name it too.
        before = [f"{nodes.describe(name)}: {_TASK_ENDED}" for name in nodes.lost_tasks]
        last_known = nodes.last_known(lost.node, now)
        wrote = next((rank for rank in nodes.ranks_of(lost.node) if rank in lost.wrote), None)
        if last_known and wrote is not None:
            last_known += f", last line of rank {wrote}: {lost.wrote[wrote]!r}"
        name = nodes.describe(lost.node)
        cause = NodeLost((*before, f"{name}: {lost.why}{last_known}"))
        return [*self._stop(cause, f"lost the node on {name}", now), *self._if_all_gone(), *self._if_all_rest()]

    def _if_all_gone(self) -> list[Action]:
        """If a node is lost and all others have ended too, end the job unless it soon ends by itself."""
        if isinstance(self.cause, NodeLost) and self.nodes.all_gone:
            return [Arm(Deadline.END, self._margins.lost)]
        return []

    def _if_all_rest(self) -> list[Action]:
        if self._decided or not self.nodes.all_rest:
            return []
        self._decided = True  # nodes that rest end one after another
        return [AtRest(self.nodes.next_port)]

    def _on_halt(self) -> list[Action]:
        self.wish = self.wish or Halt()
        look: list[Action] = [] if self.unreached or self.nodes.known else [Arm(Deadline.REACH, 0.0)]
        if self.nodes.known and not isinstance(self.phase, Running):
            look = [Arm(Deadline.HALT, self._margins.unreached)]
        return [*look, *(self._cannot_halt("no node reaches") if self.unreached else []), *self._agree()]

    def _on_terminate(self, now: float) -> list[Action]:
        if not isinstance(self.phase, Running):
            return self._on_cancel(Cancel("terminated"), now)
        self.wish, self.terminated = self.wish or Halt(), True
        return [TellNodes(messages.Terminate()), Arm(Deadline.TERMINATE, self._job.deadlines.grace_period)]

    def _cannot_halt(self, which: str) -> list[Action]:
        """Warn, after ``run.stop()``, that the ranks cannot be asked to stop."""
        text = f"its ranks cannot be asked to stop, since {which} the driver; run.cancel() ends the run"
        return [Warn(f"run {self._job.label}: {text}")] if isinstance(self.wish, Halt) else []

    def _agree(self) -> list[Action]:
        """Ask all ranks to stop together, if this is wanted and all are up."""
        stop_vote, placement = self.stop_vote, self.nodes.placement
        wanted = stop_vote.preempted or isinstance(self.wish, Halt)
        if not wanted or stop_vote.begun or placement is None or not isinstance(self.phase, Running):
            return []
        stop_vote.begin(node.executor for node in placement.nodes)
        return [TellNodes(stop_vote.order), Arm(Deadline.HALT, self._margins.repeat)]

    def _on_node_stop(self, node: str, message: messages.Halting, now: float) -> list[Action]:
        stop_vote = self.stop_vote
        match message:
            case messages.RankPreempted():
                at, rank = f"the node on {self.nodes.describe(node)}", message.rank
                stop_vote.preempt(f"{at if rank is None else f'rank {rank} on {self.nodes.host_of(rank)}'} got SIGTERM")
                return self._agree()
            case messages.Reached():
                return [TellNodes(stop_vote.order)] if stop_vote.on_reached(node, message) else []
            case messages.Halted():
                wrong = stop_vote.on_halted(message)
                return [] if wrong is None else self._stop(Disagreed(wrong), wrong, now)

    def _on_cancel(self, event: Cancel, now: float) -> list[Action]:
        self.wish = event if self.wish is None or isinstance(self.wish, Halt) else self.wish
        return self._stop(Cancelled(event.told), event.why, now) if isinstance(self.phase, _ALIVE) else []

    def _on_kill(self, now: float) -> list[Action]:
        actions = self._on_cancel(Cancel("killed"), now)
        self.wish = Kill()
        if isinstance(self.phase, Stopping):
            self.phase = replace(self.phase, reason="killed", grace=0.0)
        return [*actions, StopRanks("killed", grace=False), Arm(Deadline.END, self._margins.kill)]

    def _stop(self, cause: Cause, reason: str, now: float) -> list[Action]:
        before = self.cause
        if isinstance(self.phase, Stopping):
            self.phase = replace(self.phase, cause=joined(self.phase.cause, cause))
        else:
            cause = joined(RankFailed(self._unexplained), cause) if self._unexplained else cause
            self._enter(Stopping(now, cause, reason, self._job.deadlines.grace_period))
        # During the grace period, reports about a lost node can still arrive, unless no node has ever connected.
        patience = self._job.deadlines.grace_period + self._margins.stop if self.nodes.placement is not None else 0.0
        if not self._again and (before is None or self.cause is not before):
            self._foresee(cause)
        return [StopRanks(reason, hasty=self._again and self.wish is None), Arm(Deadline.END, patience)]

    def _foresee(self, new: Cause) -> None:
        """Note whether another attempt certainly follows.

        Only what is new is weighed, not each time all the ranks that have failed: in a large run, these are thousands.
        """
        recovery = self._job.recovery
        self._doubt = self._doubt or leaves_doubt(new, recovery)
        self._again = not self._doubt and surely_again(new, self.number, recovery)

    def _brings(self, quiet: float, now: float) -> bool:
        """Return whether nodes still bring files or output of their ended ranks."""
        since = self.phase.since + self._job.deadlines.grace_period
        output = quiet < self._margins.stop and not self.nodes.all_gone and now - since < self._margins.output
        return self.nodes.keeping or output

    def _on_due(self, due: Due, now: float) -> list[Action]:
        deadline = due.deadline
        if deadline is Deadline.END:
            waits = self._brings(due.quiet, now) and not self.killed
            return [Arm(Deadline.END, self._margins.stop)] if waits else [EndJob()]
        if deadline is Deadline.BLAME:
            return self._blame((), now) if isinstance(self.phase, _ALIVE) else []
        if deadline is Deadline.TERMINATE:
            return self._on_cancel(Cancel("terminated"), now)
        if deadline is Deadline.REACH:
            return [AskScheduler(deadline)] if isinstance(self.phase, _ALIVE) else []
        if deadline in (Deadline.WIDEN, Deadline.LEAVE):
            look = AskRoom() if deadline is Deadline.WIDEN else AskLeaving()
            return [look] if isinstance(self.phase, Running) else []
        if deadline is Deadline.HALT:
            if isinstance(self.phase, Waiting | Starting):
                return self._cannot_halt("not all nodes reach")
            going = isinstance(self.phase, Running)
            return [TellNodes(self.stop_vote.order), Arm(deadline, self._margins.repeat)] if going else []
        if self.nodes.delayed:
            return self._late(self.nodes.step or StatusDetail("starting ranks"), now)
        if self.nodes.known:
            return []  # the other nodes cannot reach the driver: they may be up
        return [AskScheduler(deadline)]

    def _late(self, step: StatusDetail, now: float) -> list[Action]:
        if not isinstance(self.phase, (Waiting, Starting)):
            return []
        return self._stop(StartTimeout(self._job.deadlines.start_timeout, step), "start_timeout has passed", now)

    def _on_reach(self, asked: Asked, now: float) -> list[Action]:
        """Warn early if no node reaches the driver. Nodes can report this only at the run's end, maybe days later."""
        if asked.reached:
            return []
        if asked.address is None and asked.step is None and isinstance(self.wish, Halt):
            return self._cannot_halt("no node reaches")
        if asked.address is None or asked.step is not None:
            self._tasks_since = None
        elif self._tasks_since is None:
            self._tasks_since = now
        patience = self._margins.look if isinstance(self.wish, Halt) else self._margins.unreached
        if self._tasks_since is None or now - self._tasks_since < patience:
            return [Arm(Deadline.REACH, self._margins.look)]
        self.unreached = True
        return [
            Warn(
                f"run {self._job.label}: its tasks have run for {patience:g} s, but no node has reached "
                f"the driver at {asked.address}. The run goes on without live log lines; results and errors still "
                "arrive. If there is a firewall in between, pass driver_ports= and open these ports"
            ),
            *self._cannot_halt("no node reaches"),
        ]

    def _on_stood(self, stacks: Stacks, now: float) -> list[Action]:
        limit = self._job.deadlines.stall_timeout
        if limit is None or not isinstance(self.phase, Running):
            return []
        stalled = Stalled(limit, stacks)
        return self._stop(stalled, stalled.message.partition("\n")[0], now)

    def _on_returned(self, collected: Collected) -> list[Action]:
        if self.nodes.placement is None:  # no node has reached the driver during the run
            self.nodes.placement = next((report.placement for report in collected.reports if report.placement), None)
        warnings: dict[str, list[str]] = {}
        self.stop_vote.note_outcomes(collected.halted)
        for report in collected.reports:
            for text in report.warnings:
                warnings.setdefault(text, []).append(report.host)
        return [*self._warn(warnings), *self._warn_of_ungrouped(collected)]

    def _warn_of_ungrouped(self, collected: Collected) -> list[Action]:
        """Warn of ranks that have trained separately from each other."""
        ungrouped = {o.rank: o.alone for report in collected.reports for o in report.outcomes if o.alone is not None}
        if not ungrouped:
            return []
        framework = ungrouped[min(ungrouped)]
        text = f"{who(sorted(ungrouped))} {alone(framework, self._job.world_size)}"
        return [Warn(f"run {self._job.label}: {text}; require_group=True makes this an error")]

    def _warn(self, warnings: Mapping[str, Sequence[str]]) -> list[Action]:
        """Return the nodes' warnings that are new, once per host. A text completes "the node on HOST ..."."""
        actions: list[Action] = []
        for text, hosts in warnings.items():
            if self.unreached and text.startswith(frames.UNREACHED):
                continue
            new = self._new(text, hosts)
            if new:
                actions.append(Warn(f"{'the' if len(new) == 1 else 'each'} node on {', '.join(new)} {text}"))
        return actions

    def _new(self, text: str, hosts: Iterable[str]) -> list[str]:
        new = sorted({host for host in hosts if (host, text) not in self.nodes.warned})
        self.nodes.warned |= {(host, text) for host in new}
        return new
