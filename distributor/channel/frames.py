"""Frames, the units of data between a node and the driver: a length, a kind, and JSON or raw log bytes.

Reading a frame runs no code from it, and unpickles nothing. To this module, the pickled return values in a ``Finished``
message are text. The length of a frame is limited.

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

#: Maximum number of bytes of a frame's body. A longer body is refused before it is read.
MAX_BODY = 4 << 20

#: Maximum number of log bytes in one frame.
MAX_LOG = 256 << 10

#: How deep the values of a message may be nested, how many there may be, and how many digits a whole number may have.
_MAX_DEPTH = 32
_MAX_VALUES = 1 << 18
_MAX_DIGITS = 40

_HEADER = struct.Struct("!IB")
_LOG = struct.Struct("!IBQ")
_JSON_KIND, _LOG_KIND = 1, 2

#: Matches the escape sequence of a surrogate in JSON. The surrogate may be a lone one, which UTF-8 cannot encode.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")

#: Matches a string in JSON. Its quantifiers are possessive, so that an unterminated string takes no longer to match
#: than others.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

#: All bytes except those that open and close lists and objects.
_NO_NESTING = bytes(set(range(256)) - set(b"[]{}"))

#: The start of the warning about a node that cannot open its channel, the connection to the driver.
UNREACHED = "cannot reach the driver"


class ProtocolError(Exception):
    """A frame or its message is too long, malformed, or not allowed by the protocol of the channel."""


class CutError(ProtocolError):
    """The connection ended before the whole frame, which holds a message or a piece of output, had arrived."""


def pack(message: Message) -> bytes:
    """Return a message as a frame whose body is JSON.

    Raises:
        ProtocolError: the frame's body would be longer than :data:`MAX_BODY`.
    """
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
    """Read the next frame; return ``None`` when the connection has ended between two frames.

    Args:
        reader: the connection.
        limit: maximum number of bytes of the frame's body.

    Raises:
        ProtocolError: the frame is too long, of an unknown kind, or malformed.
        CutError: the connection ended inside a frame.
        OSError: the network broke the connection.
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
    """Parse the body of a frame as JSON (UTF-8). Lone surrogates, which UTF-8 cannot encode, are escaped.

    Raises:
        ValueError: the body is not JSON, would take too much time, memory or stack to parse, or contains NaN or a
            repeated field.

    >>> parse(b'{"kind": "Beat", "alive": 2}')
    {'kind': 'Beat', 'alive': 2}
    """
    _check_size(body)
    values = _DECODER.decode(body.decode())
    return _encodable(values) if _HALF.search(body) else values


def _encodable(value: Any) -> Any:
    """Return plain values with lone surrogates escaped, so that all strings can be encoded as UTF-8.

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
    """Check the number and the nesting of the JSON values in a frame's body without parsing them."""
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
