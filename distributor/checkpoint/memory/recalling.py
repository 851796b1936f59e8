"""Let all ranks agree on which of the saved states in memory they load.

Ranks tell rank 0 which states they, or the agents on their machines, keep. Rank 0 chooses one that all ranks can load.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from distributor.checkpoint.memory.generations import Holding, Source, common, sources
from distributor.checkpoint.memory.memory import Memory
from distributor.checkpoint.memory.replica_placement import Seat
from distributor.checkpoint.records import step_of
from distributor.values import codec


@dataclass(frozen=True)
class MemoryOffer:
    """What a rank tells rank 0: the states that it can load itself or, if nodes keep copies, what its machine has."""

    held: tuple[str, ...] = ()
    seat: Seat | None = None
    holdings: tuple[Holding, ...] = ()  # of local rank 0 alone


@dataclass(frozen=True)
class Kept:
    """A state in memory that all ranks can load."""

    checkpoint: str  # name of its folder
    answers: list[bytes]  # of rank 0 to each rank, or a single one to all


@dataclass(frozen=True)
class InMemory:
    """The state in memory that this rank loads."""

    checkpoint: str
    sources: tuple[Source, ...] | None  # None if the rank's own node keeps all parts
    seats: tuple[Seat, ...]  # one of each node

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)


def tell(memory: Memory | None) -> bytes:
    """Return this rank's message to rank 0. Usually, it names the states that this rank can load from its own node.

    If nodes keep copies, restarted ranks may load states from other nodes. They send their seats instead, and local
    rank 0 of each node also sends the holdings of its machine.
    """
    if memory is None:
        return codec.pack(MemoryOffer())
    if memory.peers is None or not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        return codec.pack(MemoryOffer(tuple(generation.checkpoint for generation in memory.held())))
    speaks = int(os.environ.get("LOCAL_RANK", 0)) == 0
    holdings = tuple(memory.peers.holdings()) if speaks else ()
    return codec.pack(MemoryOffer(seat=memory.peers.seat, holdings=holdings))


def agree(told: Sequence[bytes]) -> Kept | None:
    """On rank 0, return the newest state in memory that all ranks can load; ``None`` if there is none."""
    offers = [codec.read(MemoryOffer, data) for data in told]
    seats = [offer.seat for offer in offers if offer.seat is not None]
    if len(seats) == len(offers):
        found = sources([holding for offer in offers for holding in offer.holdings], [seat.node for seat in seats])
        if found is None:
            return None
        checkpoint, by_rank = found
        places = tuple({seat.node: seat for seat in seats}.values())
        return Kept(checkpoint, [_pack(InMemory(checkpoint, own, places)) for own in by_rank])
    shared = common([offer.held for offer in offers])
    return None if shared is None else Kept(shared, [_pack(InMemory(shared, None, ()))])


#: The start of an answer that names a state in memory. Others are a manifest, which begins with a brace, or empty.
_MARK = b"memory "


def _pack(state: InMemory) -> bytes:
    return _MARK + codec.pack(state)


def read_answer(answer: bytes) -> InMemory | None:
    """Return the state in memory that rank 0's answer names; ``None`` if the answer names none."""
    return codec.read(InMemory, answer.removeprefix(_MARK)) if answer.startswith(_MARK) else None
