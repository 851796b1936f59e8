"""Where each rank keeps its state in memory, and which other node keeps the copy of this state. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """Where a rank keeps its state in memory, and how other nodes reach its node."""

    folder: str = ""  # no other node's has this name; empty if the node keeps no states
    node: int = 0  # rank of the node
    host: str = ""
    address: str = ""  # of the agent that receives copies; empty if it receives none
    port: int = 0


def peer_of(seat: Seat, seats: Iterable[Seat]) -> Seat | None:
    """Return a seat on the node that keeps copies of the states of node ``seat.node``; ``None`` if it is the only one.

    It is the next node on another host, so that the copies survive the loss of a host; if there is no other host, the
    next node. Node 0 follows the last node.

    >>> seats = [Seat("a", 0, "one"), Seat("b", 1, "one"), Seat("c", 2, "two")]
    >>> [peer_of(seat, seats).node for seat in seats]
    [2, 2, 0]
    """
    others = (other for other in seats if other.node != seat.node)
    return min(others, key=lambda other: (other.host == seat.host, other.node < seat.node, other.node), default=None)
