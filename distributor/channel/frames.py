"""Frames, the units of data between a node and the driver. Reading one runs no code from it and unpickles nothing.

::

    uint32 length of the body | uint8 kind | body
    kind 1: body is a message (distributor.values.messages) as a JSON object
    kind 2: body is uint32 rank | uint8 stream (1 stdout, 2 stderr, 3 what Python prints for an uncaught exception,
            4 reports) | uint64 offset | bytes as the rank wrote them
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
from typing import Any

from distributor.values import messages
from distributor.values.messages import Message
from distributor.values.outcome import Log

MAX_BODY = 4 << 20  # bytes of a body; a longer one is refused before it is read

MAX_LOG = 256 << 10  # bytes of output in one frame

_MAX_DEPTH = 32
_MAX_VALUES = 1 << 18
_MAX_DIGITS = 40

_HEADER = struct.Struct("!IB")
_LOG = struct.Struct("!IBQ")
_JSON_KIND, _LOG_KIND = 1, 2

#: Matches the escape of a surrogate in JSON, perhaps a lone one, which UTF-8 cannot encode.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")

#: Matches a string in JSON. Possessive, so that an unterminated string takes no longer than others.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

_NO_NESTING = bytes(set(range(256)) - set(b"[]{}"))  # all but the bytes that open and close lists and objects

UNREACHED = "cannot reach the driver"  # start of the warning about a node without a channel


class ProtocolError(Exception):
    """A frame or its message is too long, malformed, or not allowed."""


class CutError(ProtocolError):
    """The connection ended inside a frame."""


def pack(message: Message) -> bytes:
    """Return a message as a frame; ProtocolError if it is longer than :data:`MAX_BODY`."""
    body = json.dumps(messages.encode(message)).encode()
    if len(body) > MAX_BODY:
        raise ProtocolError(
            f"cannot send a message of {len(body)} bytes, which is longer than the maximum of {MAX_BODY} bytes"
        )
    return _HEADER.pack(len(body), _JSON_KIND) + body


def pack_log(log: Log) -> bytes:
    """Return a piece of a rank's output as a frame."""
    head = _LOG.pack(log.rank, log.stream, log.offset)
    return _HEADER.pack(_LOG.size + len(log.data), _LOG_KIND) + head + log.data


async def read(reader: asyncio.StreamReader, limit: int = MAX_BODY) -> Message | Log | None:
    """Read the next frame of at most ``limit`` bytes; ``None`` when the connection has ended between two frames.

    Raises ProtocolError for a bad frame, CutError for the end inside one, OSError if the network broke the connection.
    """
    try:
        header = await reader.readexactly(_HEADER.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise CutError("the connection ended inside a frame, before a whole message had arrived") from None
        return None
    length, kind = _HEADER.unpack(header)
    if length > limit:
        raise ProtocolError(
            f"the sender announces a message of {length} bytes, which is longer than the maximum of {limit} bytes"
        )
    try:
        body = await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise CutError("the connection ended inside a frame, before a whole message had arrived") from None
    if kind == _LOG_KIND:
        if length < _LOG.size:
            raise ProtocolError("the sender sends a piece of output without rank, stream and offset")
        rank, stream, offset = _LOG.unpack_from(body)
        return Log(rank, stream, offset, body[_LOG.size :])
    if kind != _JSON_KIND:
        raise ProtocolError(f"the sender sends data of the unknown kind {kind}, neither a message nor output of a rank")
    try:
        return messages.decode(parse(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the sender sends data that is not a message: {error}") from None


def parse(body: bytes) -> Any:
    """Parse the body of a frame as JSON, with lone surrogates escaped.

    ValueError if it is no JSON, costs too much time, memory or stack, or has NaN or a repeated field.

    >>> parse(b'{"kind": "Beat", "alive": 2}')
    {'kind': 'Beat', 'alive': 2}
    """
    _check_size(body)
    values = _DECODER.decode(body.decode())
    return _encodable(values) if _HALF.search(body) else values


def _encodable(value: Any) -> Any:
    """Escape lone surrogates.

    >>> _encodable(["half a \\ud800 character"])
    ['half a \\\\ud800 character']
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, list):
        return [_encodable(entry) for entry in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(entry) for name, entry in value.items()}
    return value


def _check_size(body: bytes) -> None:
    """Check the number and nesting of JSON values without parsing them."""
    if len(body) <= _MAX_VALUES and body.count(b"[") + body.count(b"{") <= _MAX_DEPTH:
        return
    rest, texts = _TEXT.subn(b"", body, _MAX_VALUES)
    if texts == _MAX_VALUES or sum(map(rest.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ValueError(f"the JSON contains more than {_MAX_VALUES} values")
    depth = 0
    for byte in rest.translate(None, _NO_NESTING):
        depth += 1 if byte in b"[{" else -1
        if depth > _MAX_DEPTH:
            raise ValueError(f"the JSON contains values that are nested more than {_MAX_DEPTH} deep")


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"the JSON contains a number with {len(text)} digits, which is too many")
    return int(text)


def _constant(text: str) -> float:
    if text == "NaN":
        raise ValueError("the JSON contains NaN, which is not allowed")
    return float(text)


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(fields)
    if len(values) != len(fields):
        raise ValueError("a JSON object contains the same field twice")
    return values


_DECODER = json.JSONDecoder(parse_int=_whole, parse_constant=_constant, object_pairs_hook=_object)
