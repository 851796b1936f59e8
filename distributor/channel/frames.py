"""Frames of the channel: a length, a kind, and JSON or raw log bytes.

Frames hold nothing that could execute, and their length is bounded.

::

    uint32 length of the body | uint8 kind | body
    kind 1: body is a message (distributor.values.messages) as a JSON object
    kind 2: body is uint32 rank | uint8 stream (1 stdout, 2 stderr, 3 what Python prints of an uncaught exception)
            | uint64 offset | bytes as the rank wrote them
"""

from __future__ import annotations

import asyncio
import json
import struct

from distributor.values import messages
from distributor.values.messages import Message
from distributor.values.outcome import Log

#: The longest body of a frame, in bytes. A longer one is refused before it is read.
MAX_BODY = 4 << 20

#: The largest number of log bytes in one frame.
MAX_LOG = 256 << 10

_HEADER = struct.Struct("!IB")
_LOG = struct.Struct("!IBQ")
_JSON_KIND, _LOG_KIND = 1, 2


#: The start of the warning of a node that has no channel.
UNREACHED = "cannot reach the driver"


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


class CutError(ProtocolError):
    """The connection ended inside a frame."""


def pack(message: Message) -> bytes:
    """Return a message as a JSON frame.

    Raises:
        ProtocolError: the body would be longer than :data:`MAX_BODY`.
    """
    body = json.dumps(messages.encode(message)).encode()
    if len(body) > MAX_BODY:
        raise ProtocolError(f"a message of {len(body)} bytes is longer than a frame may be ({MAX_BODY})")
    return _HEADER.pack(len(body), _JSON_KIND) + body


def pack_log(log: Log) -> bytes:
    """Return a piece of a log as a frame."""
    head = _LOG.pack(log.rank, log.stream, log.offset)
    return _HEADER.pack(_LOG.size + len(log.data), _LOG_KIND) + head + log.data


async def read(reader: asyncio.StreamReader) -> Message | Log | None:
    """Read the next frame; return ``None`` when the connection has ended between two frames.

    Raises:
        ProtocolError: the frame is too long, of an unknown kind, or malformed.
        CutError: the connection ended inside a frame.
    """
    try:
        header = await reader.readexactly(_HEADER.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise CutError("the connection ended inside a frame") from None
        return None
    length, kind = _HEADER.unpack(header)
    if length > MAX_BODY:
        raise ProtocolError(f"a frame of {length} bytes is longer than allowed ({MAX_BODY})")
    try:
        body = await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise CutError("the connection ended inside a frame") from None
    if kind == _LOG_KIND:
        if length < _LOG.size:
            raise ProtocolError("a log frame without rank, stream and offset")
        rank, stream, offset = _LOG.unpack_from(body)
        return Log(rank, stream, offset, body[_LOG.size :])
    if kind != _JSON_KIND:
        raise ProtocolError(f"unknown kind of frame: {kind}")
    try:
        return messages.decode(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from None
