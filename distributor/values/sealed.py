"""Records that end with their own digest, so that readers recognize incomplete records. Pure functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: The version of the format of records.
_FORMAT = 1

T = TypeVar("T")


def seal(record: DataclassInstance) -> bytes:
    """Return a record as two lines: the record as JSON, and the SHA-256 of the first line."""
    line = json.dumps({"format": _FORMAT, **asdict(record)}).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def unseal(data: bytes | None, build: Callable[[dict[str, Any]], T]) -> T | None:
    """Return the record in a file; ``None`` if the file is missing or incomplete, or holds something else.

    Args:
        data: the content of the file, which should be a record as :func:`seal` returns it; ``None`` if there is no
            file.
        build: makes the record (a dataclass instance) from a dict of its fields. It raises a ``ValueError``,
            ``TypeError`` or ``KeyError`` if the values do not fit.
    """
    line, _, rest = (data or b"").partition(b"\n")
    if rest.strip() != hashlib.sha256(line).hexdigest().encode():
        return None
    try:
        told = json.loads(line)
        return build(told) if told.pop("format") == _FORMAT else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
