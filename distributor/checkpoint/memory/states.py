"""States of ranks in memory: their records, where their copies go, which is overwritten, which all ranks load.

Pure functions, the counterpart of :mod:`distributor.checkpoint.records` for checkpoints on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from distributor.checkpoint.records import order_of, run_of, step_of

_ALIGNMENT = 64  # tensors in a file begin at multiples of so many bytes, as in memory that torch allocates


@dataclass(frozen=True)
class Piece:
    """One rank's part of a tensor, in a file in shared memory."""

    name: str
    dtype: str  # such as ``float32``
    shape: tuple[int, ...]
    whole: tuple[int, ...]  # the shape of the whole tensor
    is_whole: bool  # not only a part of a DTensor
    offset: int  # bytes
    size: int  # bytes


@dataclass(frozen=True)
class Generation:
    """One state of a rank in shared memory: the tensors that the rank had at one step."""

    checkpoint: str  # name of its folder, the same on all ranks
    step: int
    world_size: int
    pieces: tuple[Piece, ...]
    others: tuple[str, ...]  # names of tensors that other ranks keep for this one

    def without(self, names: Iterable[str]) -> tuple[Generation, list[tuple[int, int]]]:
        """Leave out tensors that other ranks' states hold. Return what is left, and its parts of the file."""
        left = set(names)
        pieces, parts = extract([piece for piece in self.pieces if piece.name not in left])
        others = {*self.others, *(piece.name for piece in self.pieces if piece.name in left)}
        return replace(self, pieces=pieces, others=tuple(sorted(others))), parts


def padded(size: int) -> int:
    """Return how many bytes a tensor of this size takes in a file, including the gap before the next tensor.

    >>> padded(0), padded(1), padded(64), padded(65)
    (0, 64, 64, 128)
    """
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def extract(pieces: Iterable[Piece]) -> tuple[tuple[Piece, ...], list[tuple[int, int]]]:
    """Plan a new file of some pieces: return them with new offsets, and the parts to copy as offsets and sizes."""
    moved, parts, end = [], [], 0
    for piece in pieces:
        moved.append(replace(piece, offset=end))
        parts.append((piece.offset, padded(piece.size)))
        end += padded(piece.size)
    return tuple(moved), parts


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


@dataclass(frozen=True)
class Holding:
    """A state of a rank, or a copy of it, that a node keeps in shared memory."""

    node: int  # rank of the node
    rank: int
    path: str  # of the file of tensors
    objects: int  # size of the file of objects
    generation: Generation


@dataclass(frozen=True)
class Source:
    """A file in which a rank finds some tensors of the state that it loads from memory."""

    node: int
    path: str
    pieces: tuple[Piece, ...]
    objects: int | None = None  # size of the file of objects; None if the state is another rank's


def sources(holdings: Sequence[Holding], homes: Sequence[int]) -> tuple[str, list[tuple[Source, ...]]] | None:
    """Return the newest state that is complete in the nodes' memory, and where each rank finds its parts.

    A rank first takes the tensors in its own state. If others have the same tensor in full, such as a weight under DDP,
    it may lack there. The rank takes it from a state that its own node keeps, if possible, and of these from the lowest
    rank's.
    """
    states: dict[str, list[Holding]] = {}
    for holding in holdings:
        if holding.generation.world_size == len(homes):
            states.setdefault(holding.generation.checkpoint, []).append(holding)
    for checkpoint in sorted(states, key=order_of, reverse=True):
        found = [_sources(rank, home, states[checkpoint]) for rank, home in enumerate(homes)]
        complete = [each for each in found if each is not None]
        if len(complete) == len(homes):
            return checkpoint, complete
    return None


def _sources(rank: int, home: int, holdings: Sequence[Holding]) -> tuple[Source, ...] | None:
    """Return where the parts of one rank's state are; ``None`` if any part is missing from all nodes."""
    own = [holding for holding in holdings if holding.rank == rank]
    for holding in sorted(own, key=lambda each: (each.node != home, len(each.generation.others))):
        found = [Source(holding.node, holding.path, holding.generation.pieces, holding.objects)]
        missing = set(holding.generation.others)
        for other in sorted(holdings, key=lambda each: (each.node != home, each.rank)):
            pieces = tuple(piece for piece in other.generation.pieces if piece.is_whole and piece.name in missing)
            if pieces:
                found.append(Source(other.node, other.path, pieces))
                missing -= {piece.name for piece in pieces}
        if not missing:
            return tuple(found)
    return None


def common(held: Sequence[Sequence[str]]) -> str | None:
    """Return the newest checkpoint whose state all ranks have in memory; ``None`` if there is none.

    >>> common([["step-1-3f-0-1", "step-2-3f-0-2"], ["step-1-3f-0-1"]])
    'step-1-3f-0-1'
    """
    return max(set(held[0]).intersection(*held[1:]), key=order_of, default=None)


@dataclass(frozen=True)
class MemoryOffer:
    """What a rank tells rank 0: the states that its own node has or, if nodes keep copies, where it is."""

    held: tuple[str, ...] = ()
    seat: Seat | None = None
    holdings: tuple[Holding, ...] = ()  # of its machine; of local rank 0 alone


@dataclass(frozen=True)
class InMemory:
    """The state in memory that a rank loads."""

    checkpoint: str  # name of its folder
    sources: tuple[Source, ...] | None = None  # None if the rank's own node keeps all parts
    seats: tuple[Seat, ...] = ()  # one of each node

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)


def choose(offers: Sequence[MemoryOffer]) -> list[InMemory] | None:
    """Return the newest state that all ranks can load, as each rank loads it; ``None`` if there is none."""
    seats = [offer.seat for offer in offers if offer.seat is not None]
    if len(seats) < len(offers):
        checkpoint = common([offer.held for offer in offers])
        return None if checkpoint is None else [InMemory(checkpoint)] * len(offers)
    found = sources([holding for offer in offers for holding in offer.holdings], [seat.node for seat in seats])
    if found is None:
        return None
    checkpoint, by_rank = found
    places = tuple({seat.node: seat for seat in seats}.values())
    return [InMemory(checkpoint, own, places) for own in by_rank]


def is_newer(kept: str, committed: str | None) -> bool:
    """Return whether a state in memory is at least as new as the last committed checkpoint.

    Memory holds only this run's states. A checkpoint of another run is older: it was committed before this run began.

    >>> is_newer("step-5-3f-0-5", "step-4-3f-0-4"), is_newer("step-5-3f-0-5", "step-6-3f-0-6")
    (True, False)
    """
    if committed is None or run_of(committed) != run_of(kept):
        return True
    return order_of(kept) >= order_of(committed)


def oldest(slots: Sequence[Generation | None], loaded: str | None) -> int:
    """Return which slot to overwrite: an empty one, or that with the older state, but not that with the loaded state.

    A state that is newer than the loaded one is not in the memory of all ranks, and can therefore never be loaded.

    >>> oldest([Generation("step-1-3f-0-1", 1, 2, (), ()), None], None)
    1
    """

    def key(number: int) -> tuple[bool, tuple[int, int]]:
        held = slots[number]
        if held is None:
            return False, (0, 0)
        return held.checkpoint == loaded, order_of(held.checkpoint)

    return min(range(len(slots)), key=key)
