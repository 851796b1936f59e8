"""One attempt on this node: the launcher starts the ranks, and the agent finds out how they have ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from distributor.channel.rank_slots import RankSlots
from distributor.machine import folders, limits, processes
from distributor.node import activity, fast_kill, rank_exits
from distributor.node.companions import Companions
from distributor.node.driver_link import DriverLink
from distributor.node.launchers import Launcher, SpawnedLauncher
from distributor.node.rank_exits import Ends
from distributor.node.ranks import Ranks
from distributor.node.tailing import Tailing
from distributor.stopping import vote_file
from distributor.stopping.node import NodeStop
from distributor.stopping.vote_file import VoteFile
from distributor.text.wording import who
from distributor.values import layout, messages
from distributor.values.environment import NODE_ID
from distributor.values.outcome import Outcome
from distributor.values.plan import NodeOrder

_STOP_MARGIN = 3.0  # seconds after the grace period until a launcher that has not stopped its ranks is killed

#: Seconds that other nodes' ranks have to succeed once this node's have, and its owner is gone.
_OTHERS_PATIENCE = 10.0

#: Seconds for the launcher to report the ranks' end, if a companion has ended with code 0 while ranks seem to run.
_NEWS = 1.0

_MOST_EXCEPTIONS = 8 << 20  # bytes of pickled exceptions in a node's report

_REAP_INTERVAL = 1.0  # seconds between searches for adopted processes that have ended, besides those at SIGCHLD


@dataclass(frozen=True)
class Assignment:
    """What an attempt does on this node."""

    order: NodeOrder
    store: socket.socket | None  # for the rendezvous store on node 0; closed here once the launcher has it
    shipped: Sequence[tuple[str, str]]  # paths of each shipped file: on this node, on the driver
    watch: bool  # measure how active the ranks are
    spare: bool  # the launcher forks a spare
    number: int  # from 0


@dataclass
class Notes:
    """Notes for a node's report."""

    times: dict[str, float]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StopReason:
    """An attempt is being stopped on this node."""

    gave_up: str | None = None  # why, if no order says so; completes the sentence "the node on HOST ..."
    error: tuple[str, str] | None = None  # class and text, if a companion has ended too early


@dataclass(frozen=True)
class AttemptEnded:
    """How an attempt has ended on one node."""

    outcomes: tuple[Outcome, ...]  # empty if the ranks were not started
    values: Mapping[int, bytes]  # pickled, by rank; large ones are in files
    error: tuple[str, str] | None  # class and text, for example if the ranks could not be started
    gave_up: str | None  # why the node stopped its ranks by itself
    failed: bool  # here or on another node
    launcher: Launcher  # for a possible next attempt


class NodeAttempt:
    """One attempt to run the ranks of this node."""

    def __init__(
        self, assignment: Assignment, launcher: Launcher, link: DriverLink, logs: Tailing, notes: Notes
    ) -> None:
        order = assignment.order
        self._assignment = assignment
        self._launcher = launcher
        self._link = link
        self._logs = logs
        self._notes = notes
        node = order.plan.node
        node_stop = NodeStop(
            VoteFile(layout.vote_file(order.folder)), node.first_rank, assignment.number, link.tell, link.send
        )
        self._ranks = Ranks(RankSlots(node.local_world_size), node_stop)
        self._activity: activity.Activity | None = None
        self._dumps = activity.StackRequests(order.folder, node.first_rank, link.send)
        self._companions = Companions(order, self._on_companion_death)
        self._stopping: StopReason | None = None
        self.terminated = False  # got SIGTERM, and is about to end: a fact of the node, whatever the attempt does
        self._outlasted: frozenset[int] = frozenset()  # local ranks that the launcher should have killed
        #: Timers and tasks that end ranks which do not end by themselves.
        self._backstops: list[asyncio.TimerHandle | asyncio.Future[None]] = []

    @property
    def _order(self) -> NodeOrder:
        return self._assignment.order

    @property
    def _number(self) -> int:
        return self._assignment.number

    @property
    def alive_pids(self) -> Mapping[int, int]:
        return self._ranks.alive_pids

    @property
    def node_id(self) -> str:
        """The ID that marks the node's processes in their environment."""
        return self._order.environ[NODE_ID]

    async def run(self) -> AttemptEnded:
        """Run the launcher to its end, kill what it leaves behind, and return how the ranks ended."""
        loop = asyncio.get_running_loop()
        oom_before = processes.oom_kills()
        vote_file.create(
            layout.vote_file(self._order.folder), self._order.plan.node.local_world_size, linked=self._link.is_open
        )
        # Without return_exceptions, asyncio would log an exception that nobody retrieves if this method raises.
        following = asyncio.gather(self._logs.follow(), self._ranks.node_stop.follow(), return_exceptions=True)
        successor = await self._run_processes()
        # Read before a failure is reported: the driver then orders a stop.
        stopped, stopping = self._stopping is not None, self._stopping or StopReason()
        error = stopping.error or self._ranks.start_error(self._launcher, self._order, stopped)
        if not stopped and (error is not None or self._ranks.alive):
            self._link.tell(messages.Failed(attempt=self._number))
        for backstop in self._backstops:
            backstop.cancel()
        self._notes.times["exited"] = time.time()
        # Before reading the last output, kill what ranks left behind: data-loader workers, detached children.
        await loop.run_in_executor(None, self._kill_rest, successor.pid)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        self._ranks.node_stop.look()
        await self._link.unless_orphaned(self._logs.drain())
        self._warn_of_killed()
        ended, values = self._endings(stopped, processes.oom_kills() > oom_before)
        self._ranks.slots.close()
        self._ranks.node_stop.close()
        failed_here = error is not None or any(outcome.state in ("failed", "stopped") for outcome in ended)
        failed = failed_here or not self._ranks.passed
        return AttemptEnded(ended, values, error, stopping.gave_up, failed, successor)

    async def _run_processes(self) -> Launcher:
        """Run the launcher, and companions beside it, and return the launcher for a possible next attempt.

        That is its successor, or the launcher itself if it has got no order, because a companion ended or the attempt
        was stopped.
        """
        own = {self._launcher.pid}
        reaping = asyncio.ensure_future(_reap_orphans(own))
        try:
            if not await self._companions.start(own) or self._stopping:
                return self._launcher  # the launcher got no order, so the next attempt can use it
            events = self._start()
            own.add(self._launcher.pid)
            await self._follow_events(events)
            await asyncio.get_running_loop().run_in_executor(None, self._launcher.wait)
            successor = self._launcher.successor()
            own.add(successor.pid)
            return successor
        finally:
            await self._companions.stop()
            reaping.cancel()
            await asyncio.gather(reaping, return_exceptions=True)

    def _start(self) -> int:
        """Tell the launcher what to run, and return the pipe of its events."""
        if isinstance(self._launcher, SpawnedLauncher):
            self._link.tell_importing("torch")
        store = self._assignment.store
        first = self._order.plan.node.node_rank == 0
        slots, spare = self._ranks.slots.descriptor, self._assignment.spare
        events = self._launcher.start(self._order, slots, store if first else None, spare=spare)
        if store is not None:
            store.close()
        if self._stopping:  # the order to stop came while the launcher was starting
            self._launcher.kill()
        return events

    async def _follow_events(self, descriptor: int) -> None:
        reader = asyncio.StreamReader(limit=1 << 24)  # an event may hold a long traceback
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
        )
        while line := await reader.readline():
            self._on_event(messages.decode(json.loads(line)))
        transport.close()

    def _on_event(self, event: messages.Message) -> None:
        event = self._ranks.note(event)
        if isinstance(event, messages.LauncherReady):
            self._notes.times["ready"] = event.time
            if isinstance(self._launcher, SpawnedLauncher):
                self._link.tell_importing("")
        elif isinstance(event, messages.RanksStarted):
            self._notes.times["started"] = event.time
            if self._assignment.watch:
                self._activity = activity.Activity(self._ranks.pids)
            self._link.tell(messages.Started(attempt=self._number))
        elif isinstance(event, messages.Terminated):
            self.on_terminated()
        elif isinstance(event, messages.LauncherWarning):
            self._notes.warnings.append(event.text)
            self._link.warn(self._order.host, [event.text])
        elif isinstance(event, messages.RankExited) and not event.succeeded and event.stopped is None:
            said = rank_exits.read(self._ranks.slots.descriptor, event.local_rank)
            failure = rank_exits.failure_of(self._order, event.local_rank, said, self._ends())
            age = time.time() - failure.time
            # Pickled exceptions, and texts that are too long for this message, reach the driver with the report.
            brief = replace(failure, exception=None, traceback="", log_tail="")
            failed = messages.Failed(replace(failure, exception=None), age, attempt=self._number)
            self._link.tell(failed, replace(failed, failure=brief))

    def status(self) -> messages.Beat:
        """Return a heartbeat: how many ranks are alive, and how long all have been idle, if that is measured."""
        alive = len(self._ranks.alive_pids)
        if self._launcher.returncode is not None:
            return messages.Beat(0)
        if self._activity is None or not alive:
            return messages.Beat(alive)
        return messages.Beat(alive, self._activity.look(self._logs.seen))

    def on_order(self, order: messages.Message) -> None:
        """Obey an order: stop the ranks, stop all at the same step, or send stacks."""
        if isinstance(order, messages.Stop):
            if order.grace and self._dumps.pending:
                self._dumps.then(partial(self._obey_stop, order))
            else:
                self._obey_stop(order)
        elif isinstance(order, messages.Propose | messages.Agree):
            self._ranks.node_stop.on_order(order)
        elif isinstance(order, messages.Dump):
            self._dumps.ask(order, self._ranks.alive_pids, self._ranks.exits)

    def _obey_stop(self, order: messages.Stop) -> None:
        self.stop(grace=order.grace, hasty=order.hasty)
        if order.hasty and not self._has_ended:
            folder, alive = os.path.realpath(self._order.folder), lambda: self._ranks.alive_pids
            self._backstops.append(asyncio.ensure_future(fast_kill.kill_idle(alive, folder, self._ranks.hurried)))

    def give_up(self, why: str) -> None:
        """Stop living ranks without an order or, on a node without ranks, its companions."""
        if self._ranks.alive or (self._has_no_ranks and self._ranks.started and not self._has_ended):
            self.stop(gave_up=why)

    def on_owner_gone(self) -> bool:
        """Stop the ranks, since the owner, which waited for their results, has ended.

        If all ranks of this node have succeeded, other nodes' ranks have :data:`_OTHERS_PATIENCE` seconds to succeed
        too. If all ranks of the run are about to stop together, they have the grace period. Return whether the attempt
        can still succeed.
        """
        if self._ranks.passed:
            return True
        stops = self.terminated or self._ranks.node_stop.begun
        if self._has_ended or self._stopping or not (stops or self._ranks.succeeded):
            self.stop()
            return False
        if stops and self._is_alone and self._link.is_private:  # the owner was the driver
            self._ranks.node_stop.agree_alone()
        patience = self._order.grace_period if stops else _OTHERS_PATIENCE
        asyncio.get_running_loop().call_later(patience, self._lose_patience)
        return True

    def on_terminated(self) -> None:
        """Let the ranks save and end within the grace period, since this node got SIGTERM.

        If they call ``should_stop``, all ranks of the run stop together. Otherwise, those of this node get SIGTERM.
        """
        if self.terminated or self._has_ended:
            return
        self.terminated = True
        if self._stopping:
            return
        if self._ranks.node_stop.asks and (self._link.is_open or self._is_alone):
            self._link.tell(messages.RankPreempted(attempt=self._number))
            if not self._link.is_open:
                self._ranks.node_stop.agree_alone()
            asyncio.get_running_loop().call_later(self._order.grace_period, self._end_terminated)
        elif self._dumps.pending:
            self._dumps.then(partial(self.stop, gave_up="got SIGTERM"))
        else:
            self.stop(gave_up="got SIGTERM")

    def _end_terminated(self) -> None:
        if not (self._ranks.passed or self._has_ended or self._stopping):
            late = f"got SIGTERM, and its ranks had not ended {self._order.grace_period:g} s later"
            self.stop(grace=False, gave_up=late)

    @property
    def awaits_sigterm(self) -> bool:
        """Whether it matters if this node is about to get SIGTERM: ranks would stop together."""
        return not (self.terminated or self._stopping or self._has_ended) and self._ranks.node_stop.asks

    @property
    def _has_ended(self) -> bool:
        return self._launcher.returncode is not None

    @property
    def _is_alone(self) -> bool:
        return self._order.placement.count == 1

    @property
    def _has_no_ranks(self) -> bool:
        return not self._order.plan.node.ranks

    def _lose_patience(self) -> None:
        """Stop waiting for other nodes, now that the owner has been gone for a while."""
        if not (self._ranks.passed or self._has_ended):
            self._link.orphan(lives=False)
            self.stop()

    def stop(
        self,
        *,
        grace: bool = True,
        hasty: bool = False,
        gave_up: str | None = None,
        error: tuple[str, str] | None = None,
    ) -> None:
        """Make the launcher stop its ranks within the grace period.

        The launcher decides whether ranks get the grace period, since it alone always knows which ranks run: its report
        that it has started them may not have arrived. Without ``grace``, or if all ranks have ended, it is killed at
        once.

        If ``hasty``, running ranks get no SIGTERM, because the caller ends them. Otherwise, ranks in which only this
        package handles SIGTERM, for ``runtime.should_stop``, are killed at once, since without its handler SIGTERM
        would do the same.

        Companions of a node without ranks serve ranks of other nodes, which may need them in order to save. They run
        until the launcher learns that the other nodes have ended, or until the grace period is over.
        """
        before = self._stopping
        now = self._stopping = before or StopReason(error=error)
        if gave_up is not None:
            now = self._stopping = replace(now, gave_up=gave_up)
        if before is not None and grace:
            return
        self._ranks.segments.look(processes.processes_of(self.node_id))
        unhandled = self._ranks.node_stop.stop(self._ranks.alive_pids)
        self._companions.interrupt()
        if not grace:
            self._companions.send_signal(signal.SIGKILL)
        if grace and (self._ranks.alive or self._has_no_ranks or not self._ranks.started):
            serves_others = self._has_no_ranks and self._ranks.started and now.error is None
            if not serves_others:
                self._launcher.send_signal(
                    layout.FAST_KILL_SIGNAL if hasty and self._ranks.alive else layout.STOP_SIGNAL
                )
                for local_rank, pid in () if hasty else unhandled.items():
                    if not self._ranks.tells(local_rank):
                        fast_kill.kill(local_rank, pid, self._ranks.hurried)
            loop = asyncio.get_running_loop()
            end = self._order.grace_period + _STOP_MARGIN
            self._backstops.append(loop.call_later(end, self._kill_late))
        else:
            self._launcher.kill()

    def _kill_late(self) -> None:
        """Kill a launcher that has not killed its ranks after the grace period, and so them."""
        pids = self._ranks.alive_pids
        self._outlasted = frozenset(rank for rank in pids if processes.state(pids[rank]) is not None)
        self._launcher.kill()

    def _on_companion_death(self, code: int, text: str) -> None:
        """End the attempt if a companion was still needed.

        One such as a Ray process may end with code 0 just after the last rank, before the launcher has reported the
        rank's end.
        """
        if code == 0 and not self._has_no_ranks and self._ranks.alive:
            asyncio.get_running_loop().call_later(_NEWS, self._miss_companion, code, text)
        else:
            self._miss_companion(code, text)

    def _miss_companion(self, code: int, text: str) -> None:
        """End the attempt, unless it is ending already, or the companion has ended with code 0 after all ranks."""
        ranks = self._ranks
        done = code == 0 and not self._has_no_ranks and ranks.started and not ranks.alive
        if not (self._stopping or ranks.failed or ranks.passed or done):
            self._link.tell(messages.Failed(attempt=self._number))
            self.stop(error=("CompanionError", text))

    def _kill_rest(self, spare: int) -> None:
        processes.kill_node(self.node_id, os.getpid(), keep=[spare])
        self._ranks.segments.remove()

    def _warn_of_killed(self) -> None:
        """Warn of ranks that were killed after the grace period."""
        by_launcher = {
            local_rank
            for local_rank, exit in self._ranks.exits.items()
            if exit.code == -signal.SIGKILL and self._had_grace(exit)
        }
        if killed := [
            self._order.plan.node.first_rank + local_rank for local_rank in sorted(by_launcher | self._outlasted)
        ]:
            self._notes.warnings.append(
                f"killed {who(killed)}, which had not ended {self._order.grace_period:g} s after SIGTERM: raise "
                "grace_period if saving takes longer"
            )

    def _had_grace(self, exit: messages.RankExited) -> bool:
        """Return whether a rank still ran when the grace period ended.

        Before the rendezvous of all nodes, a rank has run no user code and gets no grace period.
        """
        return exit.stopped is not None and exit.moment - exit.stopped >= self._order.grace_period

    def _endings(self, stopped: bool, oom: bool) -> tuple[tuple[Outcome, ...], dict[int, bytes]]:
        """Return the outcomes, and the return values by rank except large ones."""
        if not self._ranks.started:
            return (), {}
        node, ends = self._order.plan.node, self._ends(stopped=stopped, tails=self._logs.tails, oom=oom)
        slots = self._ranks.slots.descriptor
        said = [rank_exits.read(slots, local_rank) for local_rank in range(node.local_world_size)]
        ended = [rank_exits.outcome_of(self._order, local_rank, each, ends) for local_rank, each in enumerate(said)]
        halted = self._ranks.node_stop.halted()
        ended = [replace(each, halted=halted.get(local_rank)) for local_rank, each in enumerate(ended)]
        values = {node.first_rank + at: each.value for at, each in enumerate(said) if each and each.value is not None}
        return rank_exits.within(ended, _MOST_EXCEPTIONS), values

    def _ends(self, **more: Any) -> Ends:
        now = rank_exits.Now(time.time(), time.monotonic())
        full = self._order.folder if folders.is_full(self._order.folder) else None
        limit = limits.little_address_space(limits.here())
        return Ends(self._ranks.exits, full=full, limit=limit, now=now, shipped=self._assignment.shipped, **more)


async def _reap_orphans(own: Collection[int]) -> None:
    """Reap adopted processes as they end, since they would stay zombies.

    The exit codes of the processes in ``own`` are read elsewhere.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, processes.reap, own)
    try:
        while True:  # needed, since the search at SIGCHLD stops early if one of ``own`` has ended
            await asyncio.sleep(_REAP_INTERVAL)
            processes.reap(own)
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)
