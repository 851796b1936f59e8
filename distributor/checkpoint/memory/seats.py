"""Where each rank keeps its state in memory, and which other node keeps the copy of this state. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Seat(NamedTuple):
    """Where a rank keeps its state in memory, and how other nodes reach its node.

    Attributes:
        folder: the folder in which the rank's node keeps states; ``""`` if it keeps no states. The folders of two nodes
            never have the same name.
        node: rank of the node.
        host: name of the node's host.
        address: address at which the node's agent receives copies of states; ``""`` if it receives none.
        port: port at which the node's agent receives copies.
    """

    folder: str = ""
    node: int = 0
    host: str = ""
    address: str = ""
    port: int = 0


def peer_of(seat: Seat, seats: Iterable[Seat]) -> Seat | None:
    """Return how to reach the node that keeps copies of the states of the ranks on node ``seat.node``.

    Return ``None`` if there is only one node.

    Copies of a node's states are kept on the next node that is on another host, so that the copies survive the loss of
    a host. If all nodes are on one host, the copies are kept on the next node. Node 0 follows the last node.

    >>> seats = [Seat("a", 0, "one"), Seat("b", 1, "one"), Seat("c", 2, "two")]
    >>> [peer_of(seat, seats).node for seat in seats]
    [2, 2, 0]
    """
    others = (other for other in seats if other.node != seat.node)
    return min(others, key=lambda other: (other.host == seat.host, other.node < seat.node, other.node), default=None)
