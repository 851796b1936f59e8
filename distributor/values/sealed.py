"""Records that end with their own digest, so that readers recognize incomplete records. Pure functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_FORMAT = 1

T = TypeVar("T")


def seal(record: DataclassInstance) -> bytes:
    """Return a record as two lines: the record as JSON, and the SHA-256 of the first line."""
    line = json.dumps({"format": _FORMAT, **asdict(record)}).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


class DamagedError(OSError):
    """A file is missing or is not what was written. To read it again would not help."""


def unseal(data: bytes | None, build: Callable[[dict[str, Any]], T]) -> T | None:
    """Return the record in a file; ``None`` if the file is missing or incomplete, or holds something else."""
    try:
        return None if data is None else read(data, build)
    except OSError:
        return None


def read(data: bytes, build: Callable[[dict[str, Any]], T], name: str = "the record") -> T:
    """Return the record that :func:`seal` wrote. DamagedError if there is none, OSError if a newer version wrote it."""
    line, _, rest = data.partition(b"\n")
    if not data or rest.strip() != hashlib.sha256(line).hexdigest().encode():
        raise DamagedError(f"{name} is {'incomplete or damaged' if data else 'empty'}")
    try:
        told = json.loads(line)
        version = told.pop("format")
        if version == _FORMAT:
            return build(told)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        version = None
    if isinstance(version, int) and version > _FORMAT:
        raise OSError(f"{name} was written by a newer version of distributor (format {version})")
    raise DamagedError(f"{name} holds something else")
