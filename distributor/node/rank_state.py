"""The ranks of a node as a state machine: events in, actions out. Pure: times are arguments.

::

    NotBegun ──begin──▶ Begun ──a failure──▶ AwaitingCause ─┐
       │                  │                                 ▼
       └────── stop ──────┴───── stop, release ──────▶ Terminating ──grace period──▶ Killed
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

from distributor.values.messages import Message, RankExited, Terminated

#: Seconds before ranks are stopped after a failure: for the failure that explains a broken connection or, with a spare,
#: for the agent's order, which says whether another attempt follows.
PATIENCE = 1.0


@dataclass(frozen=True)
class BeginRanks:
    """All nodes have met: the ranks may begin."""


@dataclass(frozen=True)
class StopRequested:
    """Stop the ranks. ``ordered`` is by the agent, which ends the ranks itself if ``fast``: send no SIGTERM."""

    ordered: bool = False
    fast: bool = False


@dataclass(frozen=True)
class ReleaseRequested:
    """End ranks that only serve others, such as parameter servers. They count as succeeded."""


@dataclass(frozen=True)
class ProcessExited:
    """A rank has ended. ``early``: before its function returned. ``echoes``: it failed because another was lost."""

    local_rank: int
    code: int
    early: bool = False
    echoes: bool = False


@dataclass(frozen=True)
class SigtermReceived:
    """The launcher got SIGTERM from outside."""


@dataclass(frozen=True)
class TimePassed:
    """The deadline may be over."""


Event = BeginRanks | StopRequested | ReleaseRequested | ProcessExited | SigtermReceived | TimePassed


@dataclass(frozen=True)
class SpawnRanks:
    """Start the ranks that have not been forked."""


@dataclass(frozen=True)
class TellStarted:
    """Tell the agent that all ranks have been started."""


@dataclass(frozen=True)
class OpenGate:
    """Let the ranks begin."""


@dataclass(frozen=True)
class TellAgent:
    """Tell the agent."""

    message: Message


@dataclass(frozen=True)
class SignalRanks:
    """Send a signal to these local ranks."""

    number: signal.Signals
    local_ranks: tuple[int, ...]


Action = SpawnRanks | TellStarted | OpenGate | TellAgent | SignalRanks


@dataclass(frozen=True)
class NotBegun:
    """The ranks wait, or are not started. They have run no user code, and get no grace period."""


@dataclass(frozen=True)
class Begun:
    """The ranks have begun."""


@dataclass(frozen=True)
class AwaitingCause:
    """A rank has failed. Until ``until``, another failure may explain it, or the agent may order what follows."""

    until: float


@dataclass(frozen=True)
class Terminating:
    """The ranks have been told to stop, and are killed at ``until``."""

    until: float


@dataclass(frozen=True)
class Killed:
    """The ranks have been killed."""


Phase = NotBegun | Begun | AwaitingCause | Terminating | Killed


@dataclass
class Rank:
    """What is known about a rank's process."""

    succeeded: bool | None = None  # None while it runs
    echoes: bool = False  # failed because another was lost
    stopped: float | None = None  # when the launcher began to stop it
    released: float | None = None  # when nobody needed its service any more; it then counts as succeeded


class RankState:
    """The state of a node's ranks. ``spare``: the launcher keeps a spare, so that another attempt may follow."""

    def __init__(self, grace_period: float, *, spare: bool) -> None:
        self.ranks: list[Rank] = []  # by local rank, once started
        self.has_begun = False
        self.phase: Phase = NotBegun()
        self._grace_period = grace_period
        self._spare = spare
        self._stop: StopRequested | None = None
        self._releases = False
        self._announced = False

    @property
    def deadline(self) -> float | None:
        return self.phase.until if isinstance(self.phase, AwaitingCause | Terminating) else None

    @property
    def is_stopping(self) -> bool:
        """Whether a stop has been requested or has begun."""
        return self._stop is not None or isinstance(self.phase, Terminating | Killed)

    @property
    def has_stopped(self) -> bool:
        """Whether no rank is left after a failure or a requested stop."""
        return (self._stop is not None or self.has_failed) and not self.running()

    @property
    def has_failed(self) -> bool:
        return any(rank.succeeded is False for rank in self.ranks)

    def add(self) -> None:
        """Note that the process of the next local rank has been started."""
        self.ranks.append(Rank())

    def running(self, left_out: Collection[int] = ()) -> tuple[int, ...]:
        return tuple(
            number for number, rank in enumerate(self.ranks) if rank.succeeded is None and number not in left_out
        )

    def on(self, event: Event, now: float) -> list[Action]:
        """Take an event, and return what to do, in order."""
        actions: list[Action] = []
        match event:
            case BeginRanks() if not self.has_begun:
                self.has_begun = True  # also if a rank has just failed: torch's thread must tell the other nodes
                if isinstance(self.phase, NotBegun):
                    self.phase = Begun()
                    actions = [SpawnRanks(), *self._announce(), OpenGate()]
            case StopRequested():
                before = self._stop or StopRequested()
                self._stop = StopRequested(before.ordered or event.ordered, before.fast or event.fast)
            case ReleaseRequested():
                self._releases = True
                for number in self.running():
                    self.ranks[number].released = self.ranks[number].released or now
            case ProcessExited():
                actions = self._exited(event, now)
            case SigtermReceived():
                actions = [TellAgent(Terminated())]
        return actions + self._go_on(now)

    def _announce(self) -> list[Action]:
        """The agent must know all ranks before any begins or, since one may be killed before that, ends."""
        if self._announced:
            return []
        self._announced = True
        return [TellStarted()]

    def _exited(self, event: ProcessExited, now: float) -> list[Action]:
        rank = self.ranks[event.local_rank]
        code = event.code if rank.released is None else 0
        early = event.early and code == 0 and rank.released is None
        exited = RankExited(event.local_rank, code, rank.stopped, now, rank.released, early)
        rank.succeeded, rank.echoes = exited.succeeded, event.echoes and code >= 0
        return [*self._announce(), TellAgent(exited)]

    def _go_on(self, now: float) -> list[Action]:
        """Stop the ranks if a stop, a release or a failure asks for it, and kill them after the grace period."""
        if not (self._stop or self.has_failed or (self._releases and self.running())):
            return []
        if isinstance(self.phase, Terminating):
            if now < self.phase.until:
                return []
            self.phase = Killed()
            return self._signal(signal.SIGKILL, now)
        if isinstance(self.phase, Killed):
            return []
        if self._holds(now):
            return []
        self.phase = Terminating(now + (self._grace_period if self.has_begun else 0.0))
        return self._signal(None if self._stop and self._stop.fast else signal.SIGTERM, now)

    def _holds(self, now: float) -> bool:
        """Whether to wait before ranks get SIGTERM.

        If another attempt follows, the agent sends a signal, and kills the ranks itself. If ranks have only lost their
        connections to another, SIGTERM would hide how that one ends.
        """
        if (self._stop and self._stop.ordered) or not self.has_begun or self._releases:
            return False
        failed = [rank for rank in self.ranks if rank.succeeded is False]
        if not self._spare and not (failed and all(rank.echoes for rank in failed)):
            return False
        if isinstance(self.phase, Begun):
            self.phase = AwaitingCause(now + PATIENCE)
        return isinstance(self.phase, AwaitingCause) and now < self.phase.until

    def _signal(self, number: signal.Signals | None, now: float) -> list[Action]:
        """Note that running ranks are being stopped, and send them a signal, if any."""
        running = self.running()
        for rank in (self.ranks[local_rank] for local_rank in running):
            if rank.stopped is None and rank.released is None:
                rank.stopped = now
        return [SignalRanks(number, running)] if number is not None and running else []
