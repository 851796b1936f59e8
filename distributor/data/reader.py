"""Reads pieces of a snapshot's rows into windows, and gathers a batch's rows from them."""

from __future__ import annotations

import errno
import os
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from distributor.data.manifest import Field, SnapshotManifest, buffers
from distributor.data.row_layout import row_type, stored
from distributor.data.row_order import Rows
from distributor.machine.storage import PAUSES, Url, is_url, open_storage
from distributor.values import codec
from distributor.values.dataset import MANIFEST

_FILES = 128  # open at once


class DataError(OSError):
    """A snapshot that cannot be read: it has been removed or damaged. The text names the file."""


def read_manifest(folder: str) -> SnapshotManifest:
    """Return a snapshot's manifest.

    Raises:
        DataError: this machine does not see it.
    """
    try:
        if (content := open_storage(folder).read(MANIFEST)) is not None:
            return codec.read(SnapshotManifest, content)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except OSError as error:
        raise DataError(
            f"the snapshot {folder} cannot be read on this node: {error.strerror or error}. It must be in a folder "
            "or at a URL that all nodes see"
        ) from error


@dataclass(frozen=True)
class Pieces:
    """Consecutive rows of blocks, and where they go in a lane's window; each an array with an element a piece."""

    blocks: Rows
    firsts: Rows  # rows of the blocks
    counts: Rows
    targets: Rows  # rows of the window


class Files:
    """A snapshot's files, by the numbers of rows and blocks; for one thread."""

    def __init__(self, folder: str, manifest: SnapshotManifest) -> None:
        self.folder = folder
        self._blocks = [(part, index) for part in manifest.parts for index in range(len(part.rows))]
        self._names = [part.file for part, _ in self._blocks]
        self._starts: Any = np.cumsum([0, *(part.rows[index] for part, index in self._blocks)])
        step = 2 + buffers(manifest.fields)
        self._places: Any = np.array([place for part in manifest.parts for place in part.places]).reshape(-1, step)
        self._open: dict[str, int] = {}

    def pieces(self, firsts: Rows, counts: Rows) -> Pieces:
        """Split pieces of the table where blocks end."""
        ends = firsts + counts
        low = np.searchsorted(self._starts, firsts, "right") - 1
        high = np.searchsorted(self._starts, ends, "left")
        if (high == low + 1).all():
            return Pieces(low, firsts - self._starts[low], counts, np.cumsum(counts) - counts)
        splits = high - low  # blocks of each piece, empty ones included
        blocks = np.repeat(low - np.cumsum(splits) + splits, splits) + np.arange(splits.sum())
        begins = np.maximum(self._starts[blocks], np.repeat(firsts, splits))
        taken = np.minimum(self._starts[blocks + 1], np.repeat(ends, splits)) - begins
        return Pieces(blocks, begins - self._starts[blocks], taken, np.cumsum(taken) - taken)

    def places(self, blocks: Rows, column: int) -> Rows:
        """Return where a buffer of each block begins in its file; column 0 is the block's begin, 1 its end."""
        return self._places[blocks, column]

    def read(self, block: int, place: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes at a place of a block's file."""
        name = self._names[block]
        try:
            got = os.preadv(self._open.get(name) or self._opened(name), (into,), place)
            while 0 < got < len(into):
                more = os.preadv(self._open[name], (into[got:],), place + got)
                got = got + more if more else 0
        except OSError as error:
            raise self._lost(name, f"cannot be read: {error.strerror}") from error
        if got < len(into):
            raise self._lost(name, f"has no bytes {place} to {place + len(into)}: it was cut short")

    def finish(self) -> None:
        """Return when all reads so far have filled their memory."""

    def _lost(self, name: str, why: str) -> DataError:
        return DataError(f"the file {os.path.join(self.folder, name)} of the data {why}")

    def _opened(self, name: str) -> int:
        if len(self._open) >= _FILES:
            self.close()
        descriptor = self._open[name] = os.open(os.path.join(self.folder, name), os.O_RDONLY)
        return descriptor

    def close(self) -> None:
        """Close all files; they are opened again when they are read."""
        while self._open:
            os.close(self._open.popitem()[1])

    def check(self, block: int) -> None:
        """Compare a block with its checksum; DataError if it has changed."""
        part, index = self._blocks[block]
        begin, end = self._places[block, :2].tolist()
        content = bytearray(end - begin)
        self.read(block, begin, memoryview(content))
        self.finish()
        if zlib.crc32(content) != part.checksums[index]:
            raise self._lost(part.file, f"has changed: block {index} has another checksum than when it was written")

    @property
    def blocks(self) -> int:
        """Number of blocks of all files."""
        return len(self._blocks)


class UrlFiles(Files):
    """Files at a URL: reads wait for :meth:`finish`, which sends them together."""

    def __init__(self, folder: str, manifest: SnapshotManifest) -> None:
        super().__init__(folder, manifest)
        self._url = Url(folder, PAUSES)
        self._waiting: list[tuple[str, int, memoryview]] = []

    def read(self, block: int, place: int, into: memoryview) -> None:
        if len(into):
            self._waiting.append((self._names[block], place, into))

    def finish(self) -> None:
        if not self._waiting:
            return
        reads, self._waiting = self._waiting, []
        try:
            parts = self._url.read_ranges([(name, place, place + len(into)) for name, place, into in reads])
        except OSError as error:
            raise DataError(f"the data at {self.folder} cannot be read: {error}") from error
        for (name, place, into), part in zip(reads, parts):
            if len(part) < len(into):
                raise self._lost(name, f"has no bytes {place} to {place + len(into)}: it was cut short")
            into[:] = part


def open_files(folder: str, manifest: SnapshotManifest) -> Files:
    """Return the files of a snapshot in a folder or at a URL."""
    return UrlFiles(folder, manifest) if is_url(folder) else Files(folder, manifest)


class EvenWindows:
    """The windows of fields whose rows all have the same size, and stand side by side in one buffer."""

    def __init__(self, fields: tuple[Field, ...], lanes: int, window: int, buffer: int) -> None:
        self._kind = row_type(fields)
        self._fields = [(name, fields[int(name)]) for name in self._kind.names]
        self._size = self._kind.itemsize
        rows: Any = np.empty((lanes * window, self._size), "uint8")
        self._rows = rows
        self._bytes = memoryview(rows.reshape(-1))
        self._window = window
        self._buffer = buffer

    def fill(self, files: Files, lane: int, pieces: Pieces) -> None:
        """Read the rows of a lane's window."""
        size, read, whole = self._size, files.read, self._bytes
        places = (files.places(pieces.blocks, self._buffer) + pieces.firsts * size).tolist()
        begins = (lane * self._window + pieces.targets) * size
        ends = (begins + pieces.counts * size).tolist()
        for block, place, begin, end in zip(pieces.blocks.tolist(), places, begins.tolist(), ends):
            read(block, place, whole[begin:end])

    def gather(self, rows: Rows, per_lane: int) -> dict[str, Any]:
        """Return a batch's rows, as positions in all windows."""
        taken = self._rows.take(rows, axis=0, mode="clip").reshape(-1).view(self._kind)
        return {field.name: _tensor(np.ascontiguousarray(taken[name]), field) for name, field in self._fields}


def _tensor(values: Any, field: Field) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bool) if field.dtype == "bool" else tensor


class VariableWindows:
    """The windows of a field whose rows have different sizes: texts, binary values and lists."""

    def __init__(self, field: Field, lanes: int, window: int, buffer: int) -> None:
        self._field = field
        self._itemsize = stored(field.dtype).itemsize if field.dtype else 1
        self._window = window
        self._buffer = buffer
        self._offsets: list[Any] = [np.zeros(1, "int64") for _ in range(lanes)]  # of values, in a lane's window
        self._values = [bytearray() for _ in range(lanes)]

    def fill(self, files: Files, lane: int, pieces: Pieces) -> None:
        """Read the rows of a lane's window."""
        offsets_at = files.places(pieces.blocks, self._buffer).tolist()
        values_at = files.places(pieces.blocks, self._buffer + 1).tolist()
        whole: Any = np.zeros(int(pieces.counts.sum()) + 1, "int64")
        blocks, firsts, counts = (each.tolist() for each in (pieces.blocks, pieces.firsts, pieces.counts))
        found: list[Any] = [np.empty(count + 1, "int32") for count in counts]
        for block, place, first, count, offsets in zip(blocks, offsets_at, firsts, counts, found):
            if count:
                files.read(block, place + first * 4, memoryview(offsets.view("uint8")))
        files.finish()
        before = 0
        for offsets, count, at in zip(found, counts, pieces.targets.tolist()):
            if count:
                whole[at + 1 : at + 1 + count] = offsets[1:].astype("int64") - offsets[0] + before
                before += int(offsets[-1] - offsets[0])
        values = self._values[lane]
        if len(values) < before * self._itemsize:  # new memory costs more than a read
            values = bytearray((before + before // 8) * self._itemsize)
        view, done = memoryview(values), 0
        for block, place, count, offsets in zip(blocks, values_at, counts, found):
            if count:
                begin, end = int(offsets[0]) * self._itemsize, int(offsets[-1]) * self._itemsize
                files.read(block, place + begin, view[done : done + end - begin])
                done += end - begin
        self._offsets[lane], self._values[lane] = whole, values

    def gather(self, rows: Rows, per_lane: int) -> dict[str, Any]:
        """Return a batch's rows, as positions in all windows."""
        return {self._field.name: self._gathered(rows, per_lane)}

    def _gathered(self, rows: Rows, per_lane: int) -> Any:
        pieces = []
        for begin in range(0, len(rows), per_lane):
            lane = int(rows[begin]) // self._window
            pieces.append((lane, rows[begin : begin + per_lane] - lane * self._window))
        if self._field.kind == "list":
            return self._ragged(pieces)
        found = []
        for lane, positions in pieces:
            values, offsets = memoryview(self._values[lane]), self._offsets[lane]
            begins, ends = offsets[positions].tolist(), offsets[positions + 1].tolist()
            found += [values[begin:end].tobytes() for begin, end in zip(begins, ends)]
        return [each.decode() for each in found] if self._field.kind == "text" else found

    def _ragged(self, pieces: list[tuple[int, Rows]]) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = stored(self._field.dtype)
        values, lengths = [], []
        for lane, positions in pieces:
            of_lane = np.frombuffer(self._values[lane], dtype)
            begins = self._offsets[lane][positions]
            counts = self._offsets[lane][positions + 1] - begins
            ends = np.cumsum(counts)
            values.append(of_lane[np.repeat(begins - (ends - counts), counts) + np.arange(counts.sum())])
            lengths.append(counts)
        joined = _tensor(np.concatenate(values), self._field)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))
        return joined, offsets


Windows = list[EvenWindows | VariableWindows]


def make_windows(fields: tuple[Field, ...], lanes: int, window: int) -> Windows:
    """Return empty windows for all fields, in the order of their buffers."""
    numbers = tuple(each for each in fields if each.kind == "number")
    found: Windows = [EvenWindows(numbers, lanes, window, 2)] if numbers else []
    buffer = 2 + len(found)
    for field in (each for each in fields if each.kind != "number"):
        if field.width is None:
            found.append(VariableWindows(field, lanes, window, buffer))
        else:  # lists of equal length: their values alone
            found.append(EvenWindows((replace(field, kind="number"),), lanes, window, buffer + 1))
        buffer += 2
    return found
