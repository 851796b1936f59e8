"""Records that end with their own digest, so that readers recognize incomplete records. Pure functions."""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeVar

from distributor.values import codec

_FORMAT = 1

T = TypeVar("T")


class DamagedError(OSError):
    """A file is missing or is not what was written. To read it again would not help."""


def seal(record: Any) -> bytes:
    """Return a record as two lines: the record as JSON, and the SHA-256 of the first line."""
    line = json.dumps({"format": _FORMAT, **codec.plain(record)}).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def unseal(kind: type[T], data: bytes | None) -> T | None:
    """Return the record in a file; ``None`` if the file is missing or incomplete, or holds something else."""
    try:
        return None if data is None else read(kind, data)
    except OSError:
        return None


def read(kind: type[T], data: bytes, name: str = "the record") -> T:
    """Return the record that :func:`seal` wrote. DamagedError if there is none, OSError if a newer version wrote it."""
    line, _, rest = data.partition(b"\n")
    if not data or rest.strip() != hashlib.sha256(line).hexdigest().encode():
        raise DamagedError(f"{name} is {'incomplete or damaged' if data else 'empty'}")
    version, why = None, ""
    try:
        values = json.loads(line)
        version = values.pop("format")
        if version == _FORMAT:
            record: T = codec.build(kind, values)
            return record
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f": {error}"
    if isinstance(version, int) and version > _FORMAT:
        raise OSError(f"{name} was written by a newer version of distributor (format {version})")
    raise DamagedError(f"{name} holds something else{why}")
