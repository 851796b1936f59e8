"""What the driver knows of a run's nodes, from what they have told: who is where, up, idle, ended or lost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distributor.text.wording import count, who
from distributor.values.job import Step
from distributor.values.placement import Node, Placement

#: Nodes that a line of the log names at most.
_NODES_IN_WORDS = 16


@dataclass
class _State:
    """What is known of one node. ``heard`` is by this machine's monotonic clock, ``idle`` in seconds."""

    heard: float = 0.0
    alive: int | None = None
    idle: float | None = None
    started: bool = False
    ended: bool = False
    lost: bool = False

    def is_idle(self, limit: float) -> bool:
        """Whether no rank of it has done anything for so many seconds; a node without ranks does not count."""
        return self.alive == 0 or (self.idle is not None and self.idle >= limit)


class Nodes:
    """Nodes by name, which is that of their executor. One thread tells what they do, any may ask."""

    def __init__(self) -> None:
        #: Who runs where; ``None`` until somebody has told.
        self.placement: Placement | None = None
        self._states: dict[str, _State] = {}
        self._suspects: set[str] | None = None
        self._importing: dict[str, str] = {}
        self._expected = 0

    def importing(self, name: str, module: str, nodes: int) -> None:
        """A node imports a module, "" if it has done so; there are ``nodes`` in all. It need not be up yet."""
        self._expected = nodes
        if module:
            self._importing[name] = module
        else:
            self._importing.pop(name, None)

    def place(self, nodes: Iterable[Mapping[str, Any]]) -> None:
        """Takes the placement as a node tells it."""
        self.placement = Placement(tuple(Node.from_json(fields) for fields in nodes))

    def arrived(self, name: str) -> None:
        """A node is up, with all that a warm process has imported for it."""
        self._importing.pop(name, None)
        self.heard(name)

    def heard(self, name: str) -> None:
        """A node that is up has said something."""
        self._states.setdefault(name, _State()).heard = time.monotonic()

    def started(self, name: str) -> None:
        """Its ranks are on their way."""
        self._importing.pop(name, None)
        state = self._states[name]
        state.started, state.alive = True, len(self.ranks_of(name))

    def beat(self, name: str, alive: int, idle: float | None) -> None:
        """So many of its ranks live, and have done nothing for so many seconds."""
        self._states[name].alive, self._states[name].idle = alive, idle

    def ended(self, name: str) -> None:
        """It has said good-bye."""
        self._states[name].ended = True

    def lost(self, name: str) -> bool:
        """It has gone away without a word; ``False`` if that was known."""
        before, self._states[name].lost = self._states[name].lost, True
        return not before

    @property
    def step(self) -> Step | None:
        """What nodes do before their ranks are up, as far as that is known."""
        importing = list(dict(self._importing).values())
        if importing:
            return Step(f"importing {' and '.join(sorted(set(importing)))}", f" on {self._some(len(importing))}")
        if self.placement is not None and not self.all_up:
            return Step("starting ranks", f": they are up on {self._some(self.up)}")
        return None

    @property
    def delayed(self) -> bool:
        """Whether a node that has been heard of has not started its ranks."""
        return bool(self._importing) or self.up < self.known

    def _some(self, number: int) -> str:
        """So many of the nodes."""
        every = self._expected if self.placement is None else len(self.placement.nodes)
        return count(every, "node") if number == every else f"{number} of {count(every, 'node')}"

    @property
    def known(self) -> int:
        """How many have been heard of."""
        return len(self._states)

    @property
    def up(self) -> int:
        """How many have started their ranks."""
        return sum(state.started for state in self._now())

    @property
    def all_up(self) -> bool:
        return self.placement is not None and self.up == len(self.placement.nodes)

    @property
    def all_gone(self) -> bool:
        """Whether none is left to wait for, of those that have been heard of."""
        return all(state.ended or state.lost for state in self._now())

    @property
    def ranks_up(self) -> int:
        """How many ranks are running, as far as nodes have told."""
        return sum(state.alive or 0 for state in self._now() if not state.ended)

    def stalled(self, name: str, limit: float) -> bool:
        """Whether all ranks of all nodes were idle for ``limit`` seconds at one moment.

        To be asked whenever a node has told how idle it is: it takes two heartbeats of each to know.
        """
        if self.placement is None:
            return False
        names = {node.executor for node in self.placement.nodes}
        if not all(other in self._states and self._states[other].is_idle(limit) for other in names):
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
        """A node's ranks."""
        node = self._node(name)
        return range(0) if node is None else node.ranks

    def host_of(self, rank: int) -> str:
        """A rank's host, ``"?"`` while nobody knows."""
        return "?" if self.placement is None else self.placement.host_of(rank)

    def describe(self, name: str) -> str:
        """A node for people: ``host-b (node 1, ranks 2-3)``."""
        node = self._node(name)
        return name if node is None else f"{node.host} (node {node.node_rank}, {who(node.ranks)})"

    def last_known(self, name: str) -> str:
        """What a node that is lost had told, for people; ``""`` if that was nothing."""
        state = self._states[name]
        if state.alive is None:
            return ""
        return f"; last known {time.monotonic() - state.heard:.0f} s before: {count(state.alive, 'rank')} running"

    def __str__(self) -> str:
        """Who runs where, in one line of bearable length."""
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

    def _now(self) -> list[_State]:
        return list(self._states.values())
