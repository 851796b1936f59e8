"""What the driver knows about a run's nodes from their reports: placement, and which are up, idle, ended or lost."""

from __future__ import annotations

from dataclasses import dataclass

from distributor.text.wording import count, who
from distributor.values.job import StatusDetail
from distributor.values.placement import Node, Placement

_NODES_IN_WORDS = 16  # at most so many in one log line


@dataclass
class _State:
    """What is known about one node."""

    heard: float = 0.0  # when it last sent something
    alive: int | None = None  # live ranks at its last heartbeat
    idle: float | None = None  # seconds for which all of these had been idle
    ended: bool = False
    lost: bool = False
    keeping: bool = False  # the node's ranks have ended, and it is copying their last files to output_dir
    port: int | None = None  # where ranks can meet in the next attempt; set once the node has stopped its ranks
    unable: bool = False  # the node could not start its ranks

    def is_idle(self, limit: float) -> bool:
        """Whether the ranks have been idle for ``limit`` seconds, as a node without live ranks always is."""
        return self.alive == 0 or (self.idle is not None and self.idle >= limit)


class Nodes:
    """The nodes of a job, by the names of their executors. One thread at a time may update them; any may read."""

    def __init__(self, before: Placement | None = None) -> None:
        self._before = before  # the placement of the run's previous job
        self._placement: Placement | None = None
        self._by_name: dict[str, Node] = {}  # the nodes of the placement
        self.first_lost: str | None = None
        self._states: dict[str, _State] = {}
        # The names of nodes, so that no message costs more in a larger run.
        self._up: set[str] = set()  # have started their ranks
        self._gone: set[str] = set()  # have ended or are lost
        self._resting: set[str] = set()  # have stopped their ranks, and wait for the decision about another attempt
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
        self._states.setdefault(name, _State()).heard = now

    def started(self, name: str) -> None:
        self._importing.pop(name, None)
        state = self._states[name]
        state.alive = len(self.ranks_of(name))
        self._up.add(name)

    def beat(self, name: str, alive: int, idle: float | None) -> None:
        self._states[name].alive, self._states[name].idle = alive, idle

    def rests(self, name: str, port: int, *, unable: bool = False) -> None:
        """Record that a node has stopped its ranks, and at which port those of the next attempt could meet."""
        state = self._states[name]
        state.port, state.alive, state.unable = port, 0, unable
        self._resting.add(name)

    def again(self) -> None:
        """Record that all nodes begin another attempt."""
        for state in self._now():
            state.alive, state.idle, state.port = None, None, None
        self._up.clear()
        self._resting.clear()
        self._suspects = None

    def keeps(self, name: str, bringing: bool) -> None:
        self._states[name].keeping = bringing

    @property
    def keeping(self) -> bool:
        """Whether any node still copies files of its ended ranks to ``output_dir``."""
        return any(state.keeping and name not in self._gone for name, state in list(self._states.items()))

    def ended(self, name: str) -> None:
        """Record that a node has sent ``Bye``, its last message."""
        self._states[name].ended = True
        self._gone.add(name)

    def lost(self, name: str) -> bool:
        """Record that a node has gone without ``Bye``. Return ``False`` if it was already lost."""
        before, self._states[name].lost = self._states[name].lost, True
        self._gone.add(name)
        self.first_lost = self.first_lost or name
        return not before

    def task_lost(self, name: str) -> None:
        self._lost_tasks[name] = None

    @property
    def lost_tasks(self) -> list[str]:
        """Nodes whose ranks have succeeded, and whose agents outlive their Spark tasks."""
        return [name for name in self._lost_tasks if name not in self._gone]

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
        return len(self._states)

    @property
    def up(self) -> int:
        """Number of nodes that have started their ranks."""
        return len(self._up)

    @property
    def all_up(self) -> bool:
        return self.placement is not None and self.up == len(self.placement.nodes)

    @property
    def all_gone(self) -> bool:
        """Whether every node that has been up has ended or is lost."""
        return len(self._gone) == len(self._states)

    @property
    def all_rest(self) -> bool:
        """Whether some node waits for a decision about another attempt, and none has ranks."""
        return bool(self._resting) and len(self._resting | self._gone) == len(self._by_name)

    @property
    def next_port(self) -> int | None:
        """Port where all ranks can meet in another attempt; ``None`` unless all nodes are ready for one."""
        states = self._of_placement()
        able = all(state.port is not None and not state.unable for state in states)
        return states[0].port if states and able else None

    @property
    def ranks_up(self) -> int:
        return sum(state.alive or 0 for state in self._now() if not state.ended)

    def stalled(self, name: str, limit: float) -> bool:
        """Return whether all ranks were idle for ``limit`` seconds at one moment. Call it after each heartbeat."""
        if not self._is_idle(name, limit):
            self._busy, self._suspects = name, None
        elif self._suspects is None:
            if self._busy is None or self._is_idle(self._busy, limit):
                self._busy = next((other for other in self._by_name if not self._is_idle(other, limit)), None)
            if self._by_name and self._busy is None and self._any_alive:
                self._suspects = set(self._by_name)  # one more heartbeat of each node has to confirm
        else:
            self._suspects.discard(name)
            if not self._suspects or not self._any_alive:
                stalled, self._suspects = self._any_alive, None
                return stalled
        return False

    def _is_idle(self, name: str, limit: float) -> bool:
        return name in self._states and self._states[name].is_idle(limit)

    @property
    def _any_alive(self) -> bool:
        """Whether any rank runs: if not, nodes may still copy files."""
        return any(state.alive for state in self._now())

    def ranks_of(self, name: str) -> range:
        node = self._node(name)
        return range(0) if node is None else node.ranks

    def host_of(self, rank: int) -> str:
        """Return a rank's host, ``"?"`` while it is unknown."""
        placement = self.placement or self._before
        return "?" if placement is None else placement.host_of(rank)

    def describe(self, name: str) -> str:
        """Return a node in words: ``host-b (node 1, ranks 2-3)``."""
        node = self._node(name)
        if node is None:
            return name
        return f"{node.host} (node {node.node_rank}{f', {who(node.ranks)}' if node.ranks else ''})"

    def last_known(self, name: str, now: float) -> str:
        """Return the last report of a lost node in words; ``""`` if it never reported its ranks."""
        state = self._states[name]
        if state.alive is None:
            return ""
        return f"; last known state, {now - state.heard:.0f} s earlier: {count(state.alive, 'rank')} running"

    def __str__(self) -> str:
        if self.placement is None:
            return ""
        nodes = self.placement.nodes
        rest = f"; and {len(nodes) - _NODES_IN_WORDS} more" if len(nodes) > _NODES_IN_WORDS else ""
        return (
            f"{count(self.placement.world_size, 'rank')} on {count(len(nodes), 'node')}: "
            f"{Placement(nodes[:_NODES_IN_WORDS])}{rest}"
        )

    def _node(self, name: str) -> Node | None:
        return self._by_name.get(name)

    def _of_placement(self) -> list[_State]:
        nodes = () if self.placement is None else self.placement.nodes
        return [self._states.get(node.executor, _State()) for node in nodes]

    def _now(self) -> list[_State]:
        return list(self._states.values())
