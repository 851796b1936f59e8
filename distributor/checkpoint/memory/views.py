"""Makes tensors that use one block of memory, such as a file in shared memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from distributor.checkpoint.memory.generations import Piece

#: Tensors in one block of memory, by name.
Room = dict[str, torch.Tensor]


def views_in(block: torch.Tensor, pieces: Iterable[Piece]) -> Room:
    """Return the tensors in a block of bytes, without copying them: they use the block's memory."""
    return {
        piece.name: block[piece.offset : piece.offset + piece.size].view(dtype_of(piece)).view(piece.shape)
        for piece in pieces
    }


def dtype_of(piece: Piece) -> torch.dtype:
    """Return the torch type of a piece."""
    found = getattr(torch, piece.dtype)
    assert isinstance(found, torch.dtype)
    return found
