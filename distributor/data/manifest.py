"""What a snapshot consists of: its fields, and its files with the places of their blocks."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["number", "list", "text", "binary"]


@dataclass(frozen=True)
class Field:
    """What a batch holds under one name."""

    name: str
    kind: Kind
    dtype: str = ""  # of numbers and of lists' elements, as NumPy names it
    width: int | None = None  # elements of each row, if it has several and all rows have the same number


def buffers(fields: tuple[Field, ...]) -> int:
    """Return the number of buffers of a block: one for all numbers, then offsets and values of each other field."""
    others = sum(each.kind != "number" for each in fields)
    return (others < len(fields)) + 2 * others


@dataclass(frozen=True)
class DataFile:
    """One file that a task has written: record batches, here called blocks."""

    index: int  # of the task's partition
    file: str = ""  # its name; empty without rows
    size: int = 0
    rows: tuple[int, ...] = ()  # of each block
    #: For each block: begin and end in the file, then the place of each buffer.
    places: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()  # CRC-32 of each block from begin to end
    lengths: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # the shortest and longest list of a field
    nulls: Mapping[str, int] = field(default_factory=dict)  # number by column of the source, if they are errors
    problem: str = ""  # why nothing was written
    errno: int = 0  # of the problem, if the system has one


@dataclass(frozen=True)
class SourceDigest:
    """Digests of what a snapshot was made from."""

    asked: str = ""  # columns, rules for nulls and types
    plan: str = ""  # the table's plan and files, or its rows; empty if it would not show that rows have changed

    def is_same(self, other: "SourceDigest") -> bool | None:
        """Return whether rows of both are the same; ``None`` if it cannot be told."""
        if self.asked != other.asked:
            return False
        return self.plan == other.plan if self.plan and other.plan else None


@dataclass(frozen=True)
class SnapshotManifest:
    """A snapshot: complete, and never changed."""

    fields: tuple[Field, ...]
    parts: tuple[DataFile, ...]
    source: SourceDigest
    created: float  # seconds since the epoch

    @property
    def rows(self) -> int:
        return sum(sum(part.rows) for part in self.parts)

    @property
    def row_bytes(self) -> float:
        """The mean size of a row."""
        places, step = 0, 2 + buffers(self.fields)
        for part in self.parts:
            places += sum(part.places[1::step]) - sum(part.places[0::step])
        return places / max(self.rows, 1)

    @property
    def id(self) -> str:
        """A digest of the rows and their order: the same if the same rows are written again."""
        content = repr((self.fields, [(part.rows, part.checksums) for part in self.parts]))
        return hashlib.sha256(content.encode()).hexdigest()[:16]
