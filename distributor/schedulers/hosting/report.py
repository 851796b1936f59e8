"""Reads return values and output of a node's ranks in pieces, from memory or from files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from distributor.values.messages import Rest


def pieces(content: bytes | str, chunk: int, offset: int = 0) -> Iterator[bytes]:
    """Yield bytes, or the content of the file at a path, from ``offset`` on, in pieces of at most ``chunk`` bytes."""
    with io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as file:
        file.seek(offset)
        while piece := file.read(chunk):
            yield piece


def rest(files: Iterable[Rest], chunk: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the output that did not reach the driver during the run: tuples of rank, stream, offset and piece."""
    for file in files:
        offset = file.offset
        for piece in pieces(file.path, chunk, offset - file.base):
            yield file.rank, file.stream, offset, piece
            offset += len(piece)
