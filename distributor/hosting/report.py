"""Read the contents of a report, or the files that it names, in pieces."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from distributor.values.messages import Rest


def pieces(content: bytes | str, chunk: int, offset: int = 0) -> Iterator[bytes]:
    """Yield pieces of at most ``chunk`` bytes, from an offset on, of given bytes or of the file at a given path."""
    with io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as file:
        file.seek(offset)
        while piece := file.read(chunk):
            yield piece


def rest(files: Iterable[Rest], chunk: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the ranks' output that did not come over the channel, as tuples of rank, stream, offset and piece."""
    for file in files:
        offset = file.offset
        for piece in pieces(file.path, chunk, offset):
            yield file.rank, file.stream, offset, piece
            offset += len(piece)
