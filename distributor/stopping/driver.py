"""The driver's part in the agreement of all ranks on a step at which they stop.

The driver proposes a step to all nodes. A node accepts the step if none of its ranks has reached it; from then on, its
ranks wait at that step until the driver has decided. Once all nodes have accepted, all ranks stop at the step. If a
node does not accept, it reports how far its ranks are, and the driver proposes a later step. Messages may get lost or
come late, so the driver repeats its orders, and ignores answers to earlier proposals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distributor.outcomes.causes import disagreement
from distributor.values.messages import Agree, Halted, Propose, Reached


class Agreement:
    """The agreement of one attempt's ranks on a step at which they stop.

    Args:
        attempt: number of the attempt.
    """

    def __init__(self, attempt: int = 0) -> None:
        self._attempt = attempt
        #: Why the ranks are asked to stop, in words; ``""`` if they are not asked, or if only the user asks them.
        self.preempted = ""
        #: Whether the ranks are asked to stop so that the run can go on with more ranks.
        self.widens = False
        self._nodes: frozenset[str] = frozenset()
        self._accepted: set[str] = set()
        self._proposal = Propose(1, 0, attempt)  # accepted if no rank has called should_stop() yet
        self._ahead = 1
        self._halted: dict[int, int] = {}

    def preempt(self, why: str, *, widens: bool = False) -> None:
        """Record why the ranks must stop. Do nothing if another reason is already recorded.

        Args:
            why: the reason, in words.
            widens: whether the ranks stop so that the run can go on with more ranks.
        """
        if not self.preempted:
            self.preempted, self.widens = why, widens

    def begin(self, nodes: Iterable[str]) -> None:
        """Begin to ask the ranks of these nodes to stop."""
        self._nodes = frozenset(nodes)

    @property
    def begun(self) -> bool:
        """Whether the ranks are being asked to stop."""
        return bool(self._nodes)

    @property
    def order(self) -> Propose | Agree:
        """The driver's order to all nodes: consider a proposed step or, once all nodes accept the step, stop at it."""
        holds = self._accepted == self._nodes
        return Agree(self._proposal.number, self._proposal.step, self._attempt) if holds else self._proposal

    def on_reached(self, node: str, reached: Reached) -> bool:
        """Record a node's answer to a proposed step. Return whether the driver must send all nodes a new order.

        Ranks go on training while messages travel, so they may pass a proposed step before it is agreed. So each new
        proposal is twice as many steps ahead of the ranks as the previous proposal.
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
        """Record the steps at which ranks have stopped, by rank, as the results of the job report them."""
        self._halted.update(halted)

    @property
    def halted(self) -> bool:
        """Whether any rank was told to stop."""
        return bool(self._halted)

    def on_halted(self, halted: Halted) -> str | None:
        """Record the step at which a rank has stopped. Return an error text if ranks stopped at different steps."""
        self._halted[halted.rank] = halted.step
        return disagreement(self._halted)
