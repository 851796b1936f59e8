"""What the driver knows about a run's nodes from their reports: placement, and which are up, idle, ended or lost."""

from __future__ import annotations

from dataclasses import dataclass

from distributor.text.wording import count, who
from distributor.values.job import Step
from distributor.values.placement import Node, Placement

#: Maximum number of nodes that one log line names.
_NODES_IN_WORDS = 16


@dataclass
class _State:
    """What is known about one node.

    ``heard`` is when the node last sent something. ``alive`` is the number of its ranks that were alive at its last
    heartbeat, and ``idle`` is the number of seconds for which all these ranks had been idle.
    """

    heard: float = 0.0
    alive: int | None = None
    idle: float | None = None
    started: bool = False
    ended: bool = False
    lost: bool = False
    keeping: bool = False  # the node's ranks have ended, and it is copying their last files to output_dir
    widowed: bool = False  # the node's Spark task has ended, but the ranks have succeeded
    port: int | None = None  # where ranks can meet in the next attempt; set once the node has stopped its ranks
    unable: bool = False  # the node could not start its ranks

    def is_idle(self, limit: float) -> bool:
        """Return whether the node's ranks have been idle for ``limit`` seconds; a node without live ranks is idle."""
        return self.alive == 0 or (self.idle is not None and self.idle >= limit)


class Nodes:
    """The nodes of a job, by the names of their executors. One thread at a time may update them; any thread may read.

    Args:
        before: which ranks ran on which hosts in the run's previous job. Until a node of this job has reported where
            ranks run now, :meth:`host_of` takes hosts from ``before``.
    """

    def __init__(self, before: Placement | None = None) -> None:
        self._before = before
        #: Which ranks run on which nodes; ``None`` until a node has reported.
        self.placement: Placement | None = None
        #: The node that was lost first; ``None`` if none was lost.
        self.first_lost: str | None = None
        self._states: dict[str, _State] = {}
        self._suspects: set[str] | None = None
        self._importing: dict[str, str] = {}
        self._expected = 0

    def importing(self, name: str, module: str, nodes: int) -> None:
        """Record that a node is importing a module. The node's agent need not be running yet.

        Args:
            name: the name of the node's executor.
            module: the module's name, or "" once the node has finished importing.
            nodes: number of nodes of the run.
        """
        self._expected = nodes
        if module:
            self._importing[name] = module
        else:
            self._importing.pop(name, None)

    def arrived(self, name: str, now: float) -> None:
        """Record that a node has connected to the driver. If it was importing a module, that import has ended."""
        self._importing.pop(name, None)
        self.heard(name, now)

    def heard(self, name: str, now: float) -> None:
        """Record that a node that is up has sent something."""
        self._states.setdefault(name, _State()).heard = now

    def started(self, name: str) -> None:
        """Record that a node has started its ranks."""
        self._importing.pop(name, None)
        state = self._states[name]
        state.started, state.alive = True, len(self.ranks_of(name))

    def beat(self, name: str, alive: int, idle: float | None) -> None:
        """Record a heartbeat: how many ranks of the node are alive, and for how many seconds they have been idle."""
        self._states[name].alive, self._states[name].idle = alive, idle

    def rests(self, name: str, port: int, *, unable: bool = False) -> None:
        """Record that a node has stopped its ranks and now waits for the driver's decision about another attempt.

        Args:
            name: the name of the node's executor.
            port: the port that the node offers as a meeting point. If another attempt follows, all ranks meet at the
                port of node 0.
            unable: whether the node was unable to start its ranks. Such a node would be unable in another attempt, too.
        """
        state = self._states[name]
        state.port, state.alive, state.unable = port, 0, unable

    def again(self) -> None:
        """Record that all nodes begin another attempt: their ranks are no longer up."""
        for state in self._now():
            state.started, state.alive, state.idle, state.port = False, None, None, None
        self._suspects = None

    def keeps(self, name: str, bringing: bool) -> None:
        """Record ``bringing``: whether a node whose ranks have ended still copies their files to ``output_dir``."""
        self._states[name].keeping = bringing

    @property
    def keeping(self) -> bool:
        """Whether any node, after the end of its ranks, is still copying their files to ``output_dir``."""
        return any(state.keeping and not (state.ended or state.lost) for state in self._now())

    def ended(self, name: str) -> None:
        """Record that a node has sent ``Bye``, its last message, and ended."""
        self._states[name].ended = True

    def lost(self, name: str) -> bool:
        """Record that a node is lost: gone without a ``Bye`` message. Return ``False`` if it was already lost."""
        before, self._states[name].lost = self._states[name].lost, True
        self.first_lost = self.first_lost or name
        return not before

    def widowed(self, name: str) -> None:
        """Record that a node's Spark task ended after the node's ranks had succeeded. Such a node is not lost."""
        self._states[name].widowed = True

    @property
    def widows(self) -> list[str]:
        """Nodes whose ranks have succeeded, and whose agent (which watched the ranks) outlives its Spark task."""
        return [name for name, state in self._states.items() if state.widowed and not (state.ended or state.lost)]

    @property
    def step(self) -> Step | None:
        """What the nodes do before their ranks are up; ``None`` if that is unknown or all ranks are up."""
        importing = list(dict(self._importing).values())
        if importing:
            return Step(f"importing {' and '.join(sorted(set(importing)))}", f" on {self._some(len(importing))}")
        if self.placement is not None and not self.all_up:
            return Step("starting ranks", f": they are up on {self._some(self.up)}")
        return None

    @property
    def delayed(self) -> bool:
        """Whether any node imports a module, or has connected to the driver but has not started its ranks yet."""
        return bool(self._importing) or self.up < self.known

    def _some(self, number: int) -> str:
        """Return ``number`` as a share of the nodes, in words: ``2 of 4 nodes``."""
        every = self._expected if self.placement is None else len(self.placement.nodes)
        return count(every, "node") if number == every else f"{number} of {count(every, 'node')}"

    @property
    def known(self) -> int:
        """Number of nodes that have been up."""
        return len(self._states)

    @property
    def up(self) -> int:
        """Number of nodes that have started their ranks."""
        return sum(state.started for state in self._now())

    @property
    def all_up(self) -> bool:
        return self.placement is not None and self.up == len(self.placement.nodes)

    @property
    def all_gone(self) -> bool:
        """Whether every node that has been up has ended or is lost."""
        return all(state.ended or state.lost for state in self._now())

    @property
    def all_rest(self) -> bool:
        """Whether at least one node waits for a decision about another attempt, and no node still has ranks.

        A node that has stopped its ranks waits for the driver to decide whether another attempt follows. Nodes that
        have ended or are lost do not count: such nodes have no ranks, and wait for nothing.
        """
        states = self._of_placement()
        return any(state.port is not None for state in states) and all(
            state.port is not None or state.lost or state.ended for state in states
        )

    @property
    def next_port(self) -> int | None:
        """Port where all ranks can meet in another attempt; ``None`` unless all nodes are ready to start them again."""
        states = self._of_placement()
        able = all(state.port is not None and not state.unable for state in states)
        return states[0].port if states and able else None

    @property
    def ranks_up(self) -> int:
        """Number of running ranks, as far as nodes have reported."""
        return sum(state.alive or 0 for state in self._now() if not state.ended)

    def stalled(self, name: str, limit: float) -> bool:
        """Return whether there was a moment at which all ranks of all nodes had been idle for ``limit`` seconds.

        Call this after each heartbeat of a node, with the node's ``name``. Nodes send heartbeats at different moments.
        So once all nodes seem idle, the result is ``True`` only after one more heartbeat of each node has confirmed
        that the node is idle.
        """
        if self.placement is None:
            return False
        names = {node.executor for node in self.placement.nodes}
        over = not any(state.alive for state in self._now())  # all ranks have ended, but nodes may still copy files
        if over or not all(other in self._states and self._states[other].is_idle(limit) for other in names):
            self._suspects = None
        elif self._suspects is None:
            self._suspects = names
        else:
            self._suspects.discard(name)
            if not self._suspects:
                self._suspects = None
                return True
        return False

    def ranks_of(self, name: str) -> range:
        """Return a node's ranks."""
        node = self._node(name)
        return range(0) if node is None else node.ranks

    def host_of(self, rank: int) -> str:
        """Return a rank's host, ``"?"`` while it is unknown."""
        placement = self.placement or self._before
        return "?" if placement is None else placement.host_of(rank)

    def describe(self, name: str) -> str:
        """Return a readable description of a node: ``host-b (node 1, ranks 2-3)``."""
        node = self._node(name)
        if node is None:
            return name
        return f"{node.host} (node {node.node_rank}{f', {who(node.ranks)}' if node.ranks else ''})"

    def last_known(self, name: str, now: float) -> str:
        """Return the last report of a lost node as readable text; ``""`` if it never reported its ranks."""
        state = self._states[name]
        if state.alive is None:
            return ""
        return f"; last known state, {now - state.heard:.0f} s earlier: {count(state.alive, 'rank')} running"

    def __str__(self) -> str:
        """Return which ranks run where, in one line of limited length."""
        if self.placement is None:
            return ""
        nodes = self.placement.nodes
        rest = f"; and {len(nodes) - _NODES_IN_WORDS} more" if len(nodes) > _NODES_IN_WORDS else ""
        return (
            f"{count(self.placement.world_size, 'rank')} on {count(len(nodes), 'node')}: "
            f"{Placement(nodes[:_NODES_IN_WORDS])}{rest}"
        )

    def _node(self, name: str) -> Node | None:
        nodes = () if self.placement is None else self.placement.nodes
        return next((node for node in nodes if node.executor == name), None)

    def _of_placement(self) -> list[_State]:
        """Return what is known about each node of the placement, in the order of the placement."""
        nodes = () if self.placement is None else self.placement.nodes
        return [self._states.get(node.executor, _State()) for node in nodes]

    def _now(self) -> list[_State]:
        return list(self._states.values())
