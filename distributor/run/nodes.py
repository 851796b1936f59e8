"""What the driver knows about a run's nodes from their reports: placement, and which are up, idle, ended or lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from distributor.text.wording import count, who
from distributor.values.job import StatusDetail
from distributor.values.placement import Node, Placement

_NODES_IN_WORDS = 16  # at most so many in one log line

# The phases of a node in one attempt, of which the last two are final.


@dataclass(frozen=True)
class Coming:
    """It has not started its ranks."""


@dataclass(frozen=True)
class Up:
    """It has started its ranks."""

    alive: int  # live ranks at its last heartbeat
    idle: float | None = None  # seconds for which all of these had been idle


@dataclass(frozen=True)
class Resting:
    """It has stopped its ranks, and waits for the decision about another attempt."""

    port: int  # where the ranks of that attempt could meet
    able: bool  # it could start its ranks


@dataclass(frozen=True)
class Finishing:
    """Its ranks have ended for good."""

    copies: bool  # it is copying their last files to output_dir


@dataclass(frozen=True)
class Over:
    """It has sent ``Bye``, its last message."""


@dataclass(frozen=True)
class Gone:
    """It has gone without ``Bye``."""

    alive: int | None  # live ranks at its last heartbeat; None if it never reported any


Phase = Coming | Up | Resting | Finishing | Over | Gone


class Nodes:
    """The nodes of a job, by the names of their executors. One thread at a time may update them; any may read."""

    def __init__(self, before: Placement | None = None) -> None:
        self._before = before  # the placement of the run's previous job
        self._placement: Placement | None = None
        self._by_name: dict[str, Node] = {}  # the nodes of the placement
        self.first_lost: str | None = None
        self.warned: set[tuple[str, str]] = set()  # hosts and texts of the warnings that the user has seen
        self.up = 0  # nodes that have started their ranks in this attempt
        self._heard: dict[str, float] = {}  # when each node last sent something
        self._phases: dict[str, Phase] = {}
        self._numbers: Counter[type[Phase]] = Counter()  # of nodes in each phase: no message scans a large run
        self._busy: str | None = None  # was not idle in the last call of stalled()
        self._lost_tasks: dict[str, None] = {}
        self._suspects: set[str] | None = None
        self._importing: dict[str, str] = {}
        self._expected = 0

    @property
    def placement(self) -> Placement | None:
        """Which rank runs where; ``None`` until a node has connected."""
        return self._placement

    @placement.setter
    def placement(self, placement: Placement | None) -> None:
        self._placement = placement
        self._by_name = {} if placement is None else {node.executor: node for node in placement.nodes}

    def importing(self, name: str, module: str, nodes: int) -> None:
        """Record which module a node imports, ``""`` at the end. Its agent need not run yet."""
        self._expected = nodes
        if module:
            self._importing[name] = module
        else:
            self._importing.pop(name, None)

    def arrived(self, name: str, now: float) -> None:
        self._importing.pop(name, None)
        self.heard(name, now)

    def heard(self, name: str, now: float) -> None:
        self._heard[name] = now
        if name not in self._phases:
            self._enter(name, Coming())

    def _enter(self, name: str, phase: Phase) -> None:
        if (before := self._phases.get(name)) is not None:
            self._numbers[type(before)] -= 1
        self._phases[name] = phase
        self._numbers[type(phase)] += 1

    def _go_on(self, name: str, phase: Phase) -> None:
        """Enter a phase, unless the node has ended or is lost."""
        if not isinstance(self._phases[name], Over | Gone):
            self._enter(name, phase)

    def started(self, name: str) -> None:
        self._importing.pop(name, None)
        if isinstance(self._phases[name], Coming):
            self._enter(name, Up(len(self.ranks_of(name))))
            self.up += 1

    def beat(self, name: str, alive: int, idle: float | None) -> None:
        if isinstance(self._phases[name], Up):
            self._enter(name, Up(alive, idle))

    def rests(self, name: str, port: int, *, unable: bool = False) -> None:
        """Record that a node has stopped its ranks, and at which port those of the next attempt could meet."""
        self._go_on(name, Resting(port, not unable))

    def again(self) -> None:
        """Record that all nodes begin another attempt."""
        for name in self._phases:
            self._go_on(name, Coming())
        self.up, self._suspects = 0, None

    def keeps(self, name: str, bringing: bool) -> None:
        self._go_on(name, Finishing(bringing))

    @property
    def keeping(self) -> bool:
        """Whether any node still copies files of its ended ranks to ``output_dir``."""
        return any(isinstance(phase, Finishing) and phase.copies for phase in self._now())

    def ended(self, name: str) -> None:
        self._go_on(name, Over())

    def lost(self, name: str) -> bool:
        """Record that a node is lost. Return ``False`` if it was already."""
        phase = self._phases[name]
        if isinstance(phase, Gone):
            return False
        ended = 0 if isinstance(phase, Resting | Finishing) else None
        self._enter(name, Gone(phase.alive if isinstance(phase, Up) else ended))
        self.first_lost = self.first_lost or name
        return True

    def task_lost(self, name: str) -> None:
        self._lost_tasks[name] = None

    @property
    def lost_tasks(self) -> list[str]:
        """Nodes whose ranks have succeeded, and whose agents outlive their Spark tasks."""
        return [name for name in self._lost_tasks if not isinstance(self._phases[name], Over | Gone)]

    @property
    def step(self) -> StatusDetail | None:
        """What the nodes do before their ranks are up; ``None`` if that is unknown or all are up."""
        importing = list(dict(self._importing).values())
        if importing:
            return StatusDetail(
                f"importing {' and '.join(sorted(set(importing)))}", f" on {self._some(len(importing))}"
            )
        if self.placement is not None and not self.all_up:
            return StatusDetail("starting ranks", f": they are up on {self._some(self.up)}")
        return None

    @property
    def delayed(self) -> bool:
        """Whether any node imports a module, or has not started its ranks."""
        return bool(self._importing) or self.up < self.known

    def _some(self, number: int) -> str:
        """Return ``number`` as a share of the nodes: ``2 of 4 nodes``."""
        every = self._expected if self.placement is None else len(self.placement.nodes)
        return count(every, "node") if number == every else f"{number} of {count(every, 'node')}"

    @property
    def known(self) -> int:
        """Number of nodes that have been up."""
        return len(self._phases)

    @property
    def all_up(self) -> bool:
        return self.placement is not None and self.up == len(self.placement.nodes)

    @property
    def all_gone(self) -> bool:
        """Whether every node that has been up has ended or is lost."""
        return self._gone == len(self._phases)

    @property
    def _gone(self) -> int:
        return self._numbers[Over] + self._numbers[Gone]

    @property
    def all_rest(self) -> bool:
        """Whether some node waits for a decision about another attempt, and no known one has ranks.

        A node that has not been heard may be without a channel, and so never tell that it has ended.
        """
        resting = self._numbers[Resting]
        return resting > 0 and resting + self._gone == len(self._phases)

    @property
    def next_port(self) -> int | None:
        """Port where all ranks can meet in another attempt; ``None`` unless all nodes are ready for one."""
        phases = [self._phases.get(name) for name in self._by_name]
        ports = [phase.port for phase in phases if isinstance(phase, Resting) and phase.able]
        return ports[0] if ports and len(ports) == len(phases) else None

    @property
    def ranks_up(self) -> int:
        return sum(phase.alive for phase in self._now() if isinstance(phase, Up))

    def stalled(self, name: str, limit: float) -> bool:
        """Return whether all ranks were idle for ``limit`` seconds at one moment. Call it after each heartbeat."""
        if not self._is_idle(name, limit):
            self._busy, self._suspects = name, None
        elif self._suspects is None:
            if self._busy is None or self._is_idle(self._busy, limit):
                self._busy = next((other for other in self._by_name if not self._is_idle(other, limit)), None)
            if self._by_name and self._busy is None and self._any_alive:
                # One more heartbeat of each node has to confirm.
                self._suspects = {other for other in self._by_name if isinstance(self._phases[other], Up)}
        else:
            self._suspects.discard(name)
            if not self._suspects or not self._any_alive:
                stalled, self._suspects = self._any_alive, None
                return stalled
        return False

    def _is_idle(self, name: str, limit: float) -> bool:
        """Whether the ranks have been idle for ``limit`` seconds, as a node without live ranks always is."""
        match self._phases.get(name):
            case Up(alive=alive, idle=idle):
                return alive == 0 or (idle is not None and idle >= limit)
            case None | Coming():
                return False
        return True

    @property
    def _any_alive(self) -> bool:
        """Whether any rank runs: if not, nodes may still copy files."""
        return any(phase.alive for phase in self._now() if isinstance(phase, Up))

    def ranks_of(self, name: str) -> range:
        node = self.node(name)
        return range(0) if node is None else node.ranks

    def host_of(self, rank: int) -> str:
        """Return a rank's host, ``"?"`` while it is unknown."""
        placement = self.placement or self._before
        return "?" if placement is None else placement.host_of(rank)

    def describe(self, name: str) -> str:
        """Return a node in words: ``host-b (node 1, ranks 2-3)``."""
        node = self.node(name)
        if node is None:
            return name
        return f"{node.host} (node {node.node_rank}{f', {who(node.ranks)}' if node.ranks else ''})"

    def last_known(self, name: str, now: float) -> str:
        """Return the last report of a lost node in words; ``""`` if it never reported its ranks."""
        phase = self._phases[name]
        if not isinstance(phase, Gone) or phase.alive is None:
            return ""
        return f"; last known state, {now - self._heard[name]:.0f} s earlier: {count(phase.alive, 'rank')} running"

    def __str__(self) -> str:
        if self.placement is None:
            return ""
        nodes = self.placement.nodes
        rest = f"; and {len(nodes) - _NODES_IN_WORDS} more" if len(nodes) > _NODES_IN_WORDS else ""
        return (
            f"{count(self.placement.world_size, 'rank')} on {count(len(nodes), 'node')}: "
            f"{Placement(nodes[:_NODES_IN_WORDS])}{rest}"
        )

    def node(self, name: str) -> Node | None:
        """Return a node of the placement."""
        return self._by_name.get(name)

    def _now(self) -> list[Phase]:
        return list(self._phases.values())
