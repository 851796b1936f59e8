"""Decide which of a rank's saved states in memory is overwritten, and which state all ranks load. Pure functions.

A *state* is what a rank passes to ``save_checkpoint``. Each rank keeps its two newest states in two files in shared
memory, the *slots* (see :mod:`distributor.checkpoint.memory`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from distributor.checkpoint.records import order_of, run_of

#: In a file of tensors, each tensor begins at a multiple of this number of bytes, as in memory that torch allocates.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """One rank's part of a tensor, as it is kept in a file in shared memory.

    Attributes:
        name: the tensor's name.
        dtype: the tensor's type, such as ``"float32"``.
        shape: the shape of the part of the tensor that this rank has.
        whole: the shape of the whole tensor.
        is_whole: whether the rank has the whole tensor, and not only its part of a DTensor, which is split over the
            ranks.
        offset: where the rank's part begins in its file in shared memory, in bytes.
        size: length of this part in the file, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    is_whole: bool
    offset: int
    size: int


@dataclass(frozen=True)
class Generation:
    """Describes one state of a rank in shared memory: the tensors that the rank had at one step.

    Attributes:
        checkpoint: name of the checkpoint's folder, which all ranks of a save share.
        step: the step of the training.
        world_size: number of ranks.
        pieces: the tensors that the rank keeps.
        others: the names of the tensors that are missing from ``pieces``, because other ranks keep them.
    """

    checkpoint: str
    step: int
    world_size: int
    pieces: tuple[Piece, ...]
    others: tuple[str, ...]

    def without(self, names: Iterable[str]) -> tuple[Generation, list[tuple[int, int]]]:
        """Return this state without some tensors, for the copy that another node keeps.

        Args:
            names: the names of the tensors to leave out, since the states of other ranks hold them.

        Returns:
            The smaller state, and the parts of this state's file that make up the file of the smaller state. A part is
            an offset and a number of bytes.
        """
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
    """Plan a new file that holds only the given tensors of an old file.

    ``pieces`` says which tensors are copied from an old file to a new one, and where they are in the old file. Return
    the pieces with their offsets in the new file, and the parts of the old file to copy one after the other. Each part
    is an offset and a number of bytes.
    """
    moved, parts, end = [], [], 0
    for piece in pieces:
        moved.append(replace(piece, offset=end))
        parts.append((piece.offset, padded(piece.size)))
        end += padded(piece.size)
    return tuple(moved), parts


@dataclass(frozen=True)
class Holding:
    """A state of a rank, or a copy of it, that a node keeps in shared memory.

    Attributes:
        node: rank of the node.
        rank: the rank whose state it is.
        path: path of the file of tensors on the node.
        objects: size of a second file, which holds the rank's state apart from tensors.
        generation: describes the tensors in the file at ``path``.
    """

    node: int
    rank: int
    path: str
    objects: int
    generation: Generation


@dataclass(frozen=True)
class Source:
    """Where a rank finds some tensors of the state that it loads from memory.

    Attributes:
        node: rank of the node that keeps the file of tensors.
        path: path of this file on the node.
        pieces: where the tensors are in this file.
        objects: size of a second file, with the rank's state apart from tensors; ``None`` if ``path`` is the file of
            another rank, from which only tensors are read.
    """

    node: int
    path: str
    pieces: tuple[Piece, ...]
    objects: int | None = None


def sources(holdings: Sequence[Holding], homes: Sequence[int]) -> tuple[str, list[tuple[Source, ...]]] | None:
    """Return the newest state that is complete in the nodes' memory, and where each rank finds its parts of the state.

    If several ranks have the same tensor in full, such as a weight under DDP, the states of some of them may lack it.
    When a rank loads a state, it first takes the tensors in its own state. It takes each missing tensor from the state
    of another rank, if possible from a state that its own node keeps. If several such states contain the tensor, it
    takes the tensor from the state of the lowest rank.

    Args:
        holdings: all states of ranks, and copies of them, that any node keeps in shared memory.
        homes: for each rank, the rank of the node on which it runs.

    Returns:
        The name of the checkpoint's folder, and for each rank its sources: which files on which nodes hold its parts of
        the state. ``None`` if no state is complete, that is, if each one has parts that no node keeps. States that
        another number of ranks saved are ignored.
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


def pack(generation: Generation) -> bytes:
    """Return the record of a state: its description as JSON, which is kept next to the state's file of tensors."""
    return json.dumps({**vars(generation), "pieces": [vars(piece) for piece in generation.pieces]}).encode()


def read(data: bytes) -> Generation:
    """Return the description of a state from its record, the JSON that :func:`pack` has made."""
    return _generation(json.loads(data))


def _generation(told: dict[str, Any]) -> Generation:
    return Generation(**{**told, "pieces": tuple(_pieces(told["pieces"])), "others": tuple(told["others"])})


def _pieces(told: Iterable[dict[str, Any]]) -> Iterator[Piece]:
    for piece in told:
        yield Piece(**{**piece, "shape": tuple(piece["shape"]), "whole": tuple(piece["whole"])})


def pack_holdings(holdings: Iterable[Holding]) -> list[dict[str, Any]]:
    """Return holdings (the states that nodes keep) as plain values, for JSON."""
    return [asdict(holding) for holding in holdings]


def read_holdings(told: Iterable[dict[str, Any]]) -> list[Holding]:
    """Return holdings (the states that nodes keep) from the plain values that :func:`pack_holdings` has made."""
    return [Holding(**{**each, "generation": _generation(each["generation"])}) for each in told]


def pack_sources(found: Iterable[Source]) -> list[dict[str, Any]]:
    """Return sources (where a rank finds its tensors) as plain values, for JSON."""
    return [asdict(source) for source in found]


def read_sources(told: Iterable[dict[str, Any]]) -> tuple[Source, ...]:
    """Return sources (where a rank finds its tensors) from the plain values that :func:`pack_sources` has made."""
    return tuple(Source(**{**each, "pieces": tuple(_pieces(each["pieces"]))}) for each in told)


def oldest(slots: Sequence[Generation | None], loaded: str | None) -> int:
    """Return which of a rank's two slots (files of states) to overwrite: an empty one, or the one with the older state.

    If ranks have loaded a state from memory, the slot (file) with this state stays. The other slot is overwritten, even
    if its state is newer, because not all ranks have that state, and it can therefore never be loaded.

    >>> oldest([Generation("step-1-3f-0-1", 1, 2, (), ()), None], None)
    1
    """

    def key(number: int) -> tuple[bool, tuple[int, int]]:
        held = slots[number]
        if held is None:
            return False, (0, 0)
        return held.checkpoint == loaded, order_of(held.checkpoint)

    return min(range(len(slots)), key=key)


def common(held: Sequence[Sequence[str]]) -> str | None:
    """Return the newest checkpoint whose state all ranks have in memory; ``None`` if there is none.

    Args:
        held: for each rank, the folder names of the checkpoints whose states it has in memory.

    >>> common([["step-1-3f-0-1", "step-2-3f-0-2"], ["step-1-3f-0-1"]])
    'step-1-3f-0-1'
    """
    return max(set(held[0]).intersection(*held[1:]), key=order_of, default=None)


def is_newer(kept: str, committed: str | None) -> bool:
    """Return whether a state in memory is at least as new as the last committed checkpoint.

    Memory holds only states that this run has saved. A checkpoint of another run is older, because it was committed
    before this run began.

    >>> is_newer("step-5-3f-0-5", "step-4-3f-0-4"), is_newer("step-5-3f-0-5", "step-6-3f-0-6")
    (True, False)
    """
    if committed is None or run_of(committed) != run_of(kept):
        return True
    return order_of(kept) >= order_of(committed)
