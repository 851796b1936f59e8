"""Let all ranks agree on which of the saved states in memory they load.

Ranks tell rank 0 which states they, or the agents on their machines, keep. Rank 0 chooses one that all ranks can load.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from distributor.checkpoint.memory.generations import (
    Source,
    common,
    pack_holdings,
    pack_sources,
    read_holdings,
    read_sources,
    sources,
)
from distributor.checkpoint.memory.memory import Memory
from distributor.checkpoint.memory.replica_placement import Seat
from distributor.checkpoint.records import step_of


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
        return b"{}"
    if memory.peers is None or not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        return json.dumps({"held": [each.checkpoint for each in memory.held()]}).encode()
    speaks = int(os.environ.get("LOCAL_RANK", 0)) == 0
    holdings = pack_holdings(memory.peers.holdings()) if speaks else []
    return json.dumps({"seat": memory.peers.seat, "holdings": holdings}).encode()


def agree(told: Sequence[bytes]) -> Kept | None:
    """On rank 0, return the newest state in memory that all ranks can load; ``None`` if there is none."""
    each = [json.loads(one) for one in told]
    if all("seat" in one for one in each):
        seats = [Seat(*one["seat"]) for one in each]
        holdings = read_holdings(holding for one in each for holding in one["holdings"])
        found = sources(holdings, [seat.node for seat in seats])
        if found is None:
            return None
        checkpoint, by_rank = found
        places = tuple({seat.node: seat for seat in seats}.values())
        return Kept(checkpoint, [_pack(checkpoint, pack_sources(one), places) for one in by_rank])
    shared = common([one.get("held", []) for one in each])
    return None if shared is None else Kept(shared, [_pack(shared, None, ())])


def _pack(checkpoint: str, found: list[dict[str, object]] | None, seats: Sequence[Seat]) -> bytes:
    return _MARK + json.dumps({"checkpoint": checkpoint, "sources": found, "seats": seats}).encode()


#: The start of an answer that names a state in memory. Others are a manifest, which begins with a brace, or empty.
_MARK = b"memory "


def read_answer(answer: bytes) -> InMemory | None:
    """Return the state in memory that rank 0's answer names; ``None`` if the answer names none."""
    if not answer.startswith(_MARK):
        return None
    told = json.loads(answer.removeprefix(_MARK))
    found = None if told["sources"] is None else read_sources(told["sources"])
    return InMemory(told["checkpoint"], found, tuple(Seat(*seat) for seat in told["seats"]))
