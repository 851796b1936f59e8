"""What a slot of the memory tier holds, which slot is overwritten next, and which state all ranks load. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from distributor.checkpoint.records import order_of, run_of


@dataclass(frozen=True)
class Piece:
    """One rank's part of a tensor.

    Attributes:
        name: the tensor's name.
        dtype: its type, such as ``"float32"``.
        shape: the size of the part.
        whole: the size of the tensor.
        is_whole: whether the rank has the tensor in full, and not split over the ranks (DTensor).
        offset: where the part begins in the slot's file, in bytes.
        size: number of bytes.
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
    """One rank's state in memory.

    Attributes:
        checkpoint: name of the checkpoint's folder, which all ranks of a save share.
        step: the step of the training.
        world_size: number of ranks.
        pieces: the tensors that the rank keeps.
        others: the names of the tensors that other ranks of its node keep for it.
    """

    checkpoint: str
    step: int
    world_size: int
    pieces: tuple[Piece, ...]
    others: tuple[str, ...]


def pack(generation: Generation) -> bytes:
    """Return the record of a slot."""
    return json.dumps({**vars(generation), "pieces": [vars(piece) for piece in generation.pieces]}).encode()


def read(data: bytes) -> Generation:
    """Return what a record says."""
    told = json.loads(data)
    pieces = (
        Piece(**{**piece, "shape": tuple(piece["shape"]), "whole": tuple(piece["whole"])}) for piece in told["pieces"]
    )
    return Generation(**{**told, "pieces": tuple(pieces), "others": tuple(told["others"])})


def oldest(slots: Sequence[Generation | None], loaded: str | None) -> int:
    """Return the number of the slot to overwrite: an empty one, or the older one.

    What was loaded stays: another slot may hold a later state, but not all ranks had it.

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
    """Return the newest checkpoint that all ranks hold; ``None`` if there is none.

    Args:
        held: the names of the folders of the checkpoints that each rank holds.

    >>> common([["step-1-3f-0-1", "step-2-3f-0-2"], ["step-1-3f-0-1"]])
    'step-1-3f-0-1'
    """
    return max(set(held[0]).intersection(*held[1:]), key=order_of, default=None)


def is_newer(kept: str, committed: str | None) -> bool:
    """Return whether the state in memory is at least as new as the last committed checkpoint.

    Memory holds states of this run only. A checkpoint of another run was committed before this one began.

    >>> is_newer("step-5-3f-0-5", "step-4-3f-0-4"), is_newer("step-5-3f-0-5", "step-6-3f-0-6")
    (True, False)
    """
    if committed is None or run_of(committed) != run_of(kept):
        return True
    return order_of(kept) >= order_of(committed)
