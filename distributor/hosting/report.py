"""Read the files that a report names, in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distributor.values.messages import Rest


def pieces(path: str, chunk: int, offset: int = 0) -> Iterator[bytes]:
    """Yield a file from an offset on, in pieces of at most ``chunk`` bytes."""
    with open(path, "rb") as file:
        file.seek(offset)
        while piece := file.read(chunk):
            yield piece


def rest(files: Iterable[Rest], chunk: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the ranks' output that the channel did not bring, as a report lists it: rank, stream, offset, piece."""
    for file in files:
        offset = file.offset
        for piece in pieces(file.path, chunk, offset):
            yield file.rank, file.stream, offset, piece
            offset += len(piece)
