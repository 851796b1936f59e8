"""Reads pieces of a snapshot's rows into windows, and gathers a batch's rows from them."""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from distributor.data.manifest import BUFFERS, FILE, Field, Manifest
from distributor.data.plan import Rows
from distributor.errors import ConfigurationError
from distributor.values import codec

_FILES = 32  # open at once


class DataError(OSError):
    """A snapshot that cannot be read: it has been removed or damaged. The text names the file."""


def read_manifest(folder: str) -> Manifest:
    """Return a snapshot's manifest.

    Raises:
        DataError: this machine does not see it.
    """
    try:
        with open(os.path.join(folder, FILE), "rb") as file:
            return codec.read(Manifest, file.read())
    except OSError as error:
        raise DataError(
            f"the snapshot {folder} cannot be read on this node: {error.strerror}. It must be in a folder that all "
            "nodes see"
        ) from error


class Files:
    """A snapshot's files, by the numbers of rows and blocks."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self.folder = folder
        self.parts = manifest.parts
        self.fields = manifest.fields
        self._blocks = [(part, index) for part in manifest.parts for index in range(len(part.rows))]
        self._starts = np.cumsum([0, *(part.rows[index] for part, index in self._blocks)]).tolist()
        self._step = 2 + sum(BUFFERS[each.kind] for each in manifest.fields)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()  # two threads read: the loader's and the one that checks

    def blocks_of(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """Return the blocks of some rows: the block's number, the first row in it, and the number of rows."""
        found = []
        block = bisect_right(self._starts, first) - 1
        while count:
            taken = min(count, self._starts[block + 1] - first)
            if taken:  # some blocks may be empty
                found.append((block, first - self._starts[block], taken))
            first, count, block = first + taken, count - taken, block + 1
        return found

    def places(self, block: int) -> tuple[int, ...]:
        """Return where a block begins and ends in its file, and where its buffers begin."""
        part, index = self._blocks[block]
        return part.places[index * self._step : (index + 1) * self._step]

    def read(self, block: int, place: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes at a place of a block's file."""
        name = self._blocks[block][0].file
        with self._lock:
            try:
                got = os.preadv(self._descriptor(name), [into], place)
                while 0 < got < len(into):
                    more = os.preadv(self._descriptor(name), [into[got:]], place + got)
                    got = got + more if more else 0
            except OSError as error:
                raise self._lost(name, f"cannot be read: {error.strerror}") from error
        if got < len(into):
            raise self._lost(name, f"has no bytes {place} to {place + len(into)}: it was cut short")

    def _lost(self, name: str, why: str) -> DataError:
        return DataError(f"the file {os.path.join(self.folder, name)} of the data {why}")

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= _FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[name] = os.open(os.path.join(self.folder, name), os.O_RDONLY)
        self._open.move_to_end(name)
        return self._open[name]

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def check(self, block: int) -> None:
        """Compare a block with its checksum; DataError if it has changed."""
        part, index = self._blocks[block]
        begin, end = self.places(block)[:2]
        content = bytearray(end - begin)
        self.read(block, begin, memoryview(content))
        if zlib.crc32(content) != part.checksums[index]:
            raise self._lost(part.file, f"has changed: block {index} has another checksum than when it was written")

    @property
    def blocks(self) -> int:
        return len(self._blocks)


class Numbers:
    """The windows of a field whose rows all have the same size."""

    def __init__(self, field: Field, lanes: int, window: int, first: int) -> None:
        self._is_bool = field.dtype == "bool"
        shape = (lanes * window,) if field.width is None else (lanes * window, field.width)
        self._rows: Any = np.empty(shape, "uint8" if self._is_bool else field.dtype)
        flat: Any = self._rows.reshape(-1).view("uint8")
        self._bytes = memoryview(flat)
        self._size = self._rows.itemsize * (1 if field.width is None else field.width)
        self._window = window
        self._first = first + BUFFERS[field.kind] - 1  # values come last

    def begin(self, lane: int, rows: int) -> None:
        pass

    def fill(self, files: Files, lane: int, at: int, block: int, first: int, count: int) -> None:
        begin = (lane * self._window + at) * self._size
        into = self._bytes[begin : begin + count * self._size]
        if into:
            files.read(block, files.places(block)[self._first] + first * self._size, into)

    def gather(self, rows: Rows, per_lane: int) -> Any:
        tensor = torch.from_numpy(np.take(self._rows, rows, axis=0, mode="clip"))
        return tensor.view(torch.bool) if self._is_bool else tensor


class Variable:
    """The windows of a field whose rows have different sizes: texts, binary values and lists."""

    def __init__(self, field: Field, lanes: int, window: int, first: int) -> None:
        self._field = field
        self._itemsize = 1 if not field.dtype or field.dtype == "bool" else np.dtype(field.dtype).itemsize
        self._window = window
        self._first = first
        self._offsets: list[Any] = [np.zeros(1, "int64") for _ in range(lanes)]  # of values, in a lane's window
        self._values = [bytearray() for _ in range(lanes)]

    def begin(self, lane: int, rows: int) -> None:
        self._offsets[lane] = np.zeros(rows + 1, "int64")
        self._values[lane] = bytearray()

    def fill(self, files: Files, lane: int, at: int, block: int, first: int, count: int) -> None:
        offsets_at, values_at = files.places(block)[self._first : self._first + 2]
        offsets: Any = np.empty(count + 1, "int32")
        files.read(block, offsets_at + first * 4, offsets.data.cast("B"))
        begin, end = int(offsets[0]) * self._itemsize, int(offsets[-1]) * self._itemsize
        values = self._values[lane]
        before = len(values)
        values.extend(bytes(end - begin))
        if end > begin:
            with memoryview(values) as view:
                files.read(block, values_at + begin, view[before:])
        of_lane = self._offsets[lane]
        of_lane[at + 1 : at + 1 + count] = offsets[1:].astype("int64") - offsets[0] + before // self._itemsize

    def gather(self, rows: Rows, per_lane: int) -> Any:
        pieces = []
        for begin in range(0, len(rows), per_lane):
            lane = int(rows[begin]) // self._window
            pieces.append((lane, rows[begin : begin + per_lane] - lane * self._window))
        if self._field.kind == "list":
            return self._ragged(pieces)
        found = []
        for lane, positions in pieces:
            values, offsets = self._values[lane], self._offsets[lane]
            begins, ends = offsets[positions].tolist(), offsets[positions + 1].tolist()
            found += [bytes(values[begin:end]) for begin, end in zip(begins, ends)]
        return [each.decode() for each in found] if self._field.kind == "text" else found

    def _ragged(self, pieces: list[tuple[int, Rows]]) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = "uint8" if self._field.dtype == "bool" else self._field.dtype
        values, lengths = [], []
        for lane, positions in pieces:
            of_lane = np.frombuffer(self._values[lane], dtype)
            begins = self._offsets[lane][positions]
            counts = self._offsets[lane][positions + 1] - begins
            ends = np.cumsum(counts)
            values.append(of_lane[np.repeat(begins - (ends - counts), counts) + np.arange(counts.sum())])
            lengths.append(counts)
        joined = torch.from_numpy(np.concatenate(values))
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))
        return (joined.view(torch.bool) if self._field.dtype == "bool" else joined), offsets


def windows(fields: tuple[Field, ...], lanes: int, window: int) -> dict[str, Numbers | Variable]:
    """Return empty windows for each field."""
    found: dict[str, Numbers | Variable] = {}
    first = 2
    for field in fields:
        is_even = field.kind == "number" or (field.kind == "list" and field.width is not None)
        found[field.name] = (Numbers if is_even else Variable)(field, lanes, window, first)
        first += BUFFERS[field.kind]
    return found


def check_torch(fields: tuple[Field, ...]) -> None:
    """Raise a ConfigurationError if a field has a type that this torch does not have."""
    for field in fields:
        if field.dtype and not hasattr(torch, field.dtype):
            raise ConfigurationError(f"this torch has no dtype {field.dtype!r}, which the field {field.name!r} has")
