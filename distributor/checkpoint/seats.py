"""Where each rank keeps its state in memory, and which node keeps the copy. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Seat(NamedTuple):
    """Where a rank keeps its state in memory.

    Attributes:
        folder: the folder of the rank's node, which no other node has under this name; ``""`` if it keeps none.
        node: rank of the node.
        host: name of its host.
        address: address at which its agent takes copies; ``""`` if it takes none.
        port: port at which its agent takes copies.
    """

    folder: str = ""
    node: int = 0
    host: str = ""
    address: str = ""
    port: int = 0


def peer_of(seat: Seat, seats: Iterable[Seat]) -> Seat | None:
    """Return the seat whose node keeps the copies of another seat's node; ``None`` if there is only one node.

    It is the next node on another host, or else the next node.

    >>> seats = [Seat("a", 0, "one"), Seat("b", 1, "one"), Seat("c", 2, "two")]
    >>> [peer_of(seat, seats).node for seat in seats]
    [2, 2, 0]
    """
    others = (other for other in seats if other.node != seat.node)
    return min(others, key=lambda other: (other.host == seat.host, other.node < seat.node, other.node), default=None)
