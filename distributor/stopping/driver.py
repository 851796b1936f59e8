"""The driver's part in the agreement of all ranks on a step at which they stop.

The driver proposes a step to all nodes. A node accepts if none of its ranks has reached it; its ranks then wait there
for the decision. If not, it reports how far its ranks are, and the driver proposes a later step. Once all nodes have
accepted, all ranks stop. Messages may get lost or come late, so orders are repeated, and late answers ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distributor.outcomes.causes import disagreement
from distributor.values.messages import Agree, Halted, Propose, Reached


class CoordinatedStop:
    """The agreement of one attempt's ranks on a step at which they stop."""

    def __init__(self, attempt: int = 0) -> None:
        self._attempt = attempt
        self.preempted = ""  # why the ranks are asked to stop; ``""`` if they are not, or if only the user asks them
        self.widens = False  # they stop so that the run can go on with more ranks
        self._nodes: frozenset[str] = frozenset()
        self._accepted: set[str] = set()
        self._proposal = Propose(1, 0, attempt)  # accepted if no rank has called should_stop() yet
        self._ahead = 1
        self._halted: dict[int, int] = {}

    def preempt(self, why: str, *, widens: bool = False) -> None:
        """Record why the ranks must stop, unless another reason is already recorded."""
        if not self.preempted:
            self.preempted, self.widens = why, widens

    def begin(self, nodes: Iterable[str]) -> None:
        """Begin to ask the ranks of these nodes to stop."""
        self._nodes = frozenset(nodes)

    @property
    def begun(self) -> bool:
        return bool(self._nodes)

    @property
    def order(self) -> Propose | Agree:
        """The order to all nodes: consider a proposed step or, once all nodes accept the step, stop at it."""
        holds = self._accepted == self._nodes
        return Agree(self._proposal.number, self._proposal.step, self._attempt) if holds else self._proposal

    def on_reached(self, node: str, reached: Reached) -> bool:
        """Record a node's answer to a proposed step. Return whether the driver must send all nodes a new order.

        Ranks train on while messages travel, so each new proposal is twice as far ahead of them as the previous one.
        """
        if reached.number != self._proposal.number or node not in self._nodes or isinstance(self.order, Agree):
            return False
        if reached.accepted:
            self._accepted.add(node)
            return isinstance(self.order, Agree)
        step = max(reached.step, self._proposal.step) + self._ahead
        self._proposal, self._ahead = Propose(self._proposal.number + 1, step, self._attempt), 2 * self._ahead
        self._accepted.clear()
        return True

    def note_outcomes(self, halted: Mapping[int, int]) -> None:
        """Record the steps at which ranks have stopped, as the results of the job report them."""
        self._halted.update(halted)

    @property
    def halted(self) -> bool:
        return bool(self._halted)

    def on_halted(self, halted: Halted) -> str | None:
        """Record the step at which a rank has stopped. Return an error text if ranks stopped at different steps."""
        step = next(iter(self._halted.values()), halted.step)
        self._halted[halted.rank] = halted.step
        return None if halted.step == step else disagreement(self._halted)
