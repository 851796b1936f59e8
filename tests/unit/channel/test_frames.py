"""The frames of the channel."""

import asyncio
import itertools
import json
import struct

import pytest
from hypothesis import example, given, strategies as st

from distributor.channel import frames
from distributor.channel.frames import ProtocolError
from distributor.values.outcome import Log

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
messages = st.dictionaries(st.text(), values, max_size=4)
logs = st.builds(Log, st.integers(0, 2**32 - 1), st.sampled_from([1, 2]), st.integers(0, 2**64 - 1), st.binary())


def read_all(data, cuts=()):
    """The frames in ``data``, which arrives in pieces and then ends."""

    async def run():
        reader = asyncio.StreamReader()
        edges = [0, *sorted(cuts), len(data)]
        for start, end in itertools.pairwise(edges):
            asyncio.get_running_loop().call_soon(reader.feed_data, data[start:end])
        asyncio.get_running_loop().call_soon(reader.feed_eof)
        found = []
        while (frame := await frames.read(reader)) is not None:
            found.append(frame)
        return found

    return asyncio.run(run())


def pack(frame):
    return frames.pack_log(frame) if isinstance(frame, Log) else frames.pack(frame)


def raw(kind, body):
    return struct.pack("!IB", len(body), kind) + body


@given(st.lists(messages | logs, max_size=5), st.data())
def test_round_trip(sent, data):
    packed = b"".join(map(pack, sent))
    cuts = data.draw(st.lists(st.integers(0, len(packed)), max_size=4))
    assert read_all(packed, cuts) == sent


def test_the_largest_pieces_pass():
    log = Log(3, 2, 0, bytes(frames.MAX_LOG))
    message = {"text": "x" * (frames.MAX_BODY - len(json.dumps({"text": ""})))}
    assert read_all(frames.pack_log(log) + frames.pack(message)) == [log, message]


def test_a_message_longer_than_a_frame_is_not_packed():
    with pytest.raises(ProtocolError, match="longer"):
        frames.pack({"text": "x" * frames.MAX_BODY})


@pytest.mark.parametrize("kind", [1, 2])
def test_a_longer_frame_is_refused_before_it_is_read(kind):
    async def run():
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack("!IB", frames.MAX_BODY + 1, kind))
        # Without an end of the stream: reading on would wait for ever.
        await asyncio.wait_for(frames.read(reader), 30)

    with pytest.raises(ProtocolError, match="longer"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(raw(0, b"{}"), "unknown kind", id="kind-0"),
        pytest.param(raw(3, b"{}"), "unknown kind", id="kind-3"),
        pytest.param(raw(1, b""), "not JSON", id="empty"),
        pytest.param(raw(1, b"{"), "not JSON", id="cut-json"),
        pytest.param(raw(1, b"\xff\xfe\xfa"), "not JSON", id="not-text"),
        pytest.param(raw(1, b"[1]"), "not a JSON object", id="list"),
        pytest.param(raw(1, b"null"), "not a JSON object", id="null"),
        pytest.param(raw(2, b"\0\0\0\1"), "without rank, stream and offset", id="short-log"),
        pytest.param(raw(1, b'{"a":' + b"[" * 100_000), "not JSON", id="deeply-nested"),
    ],
)
def test_what_does_not_speak_the_protocol(data, message):
    with pytest.raises(ProtocolError, match=message):
        read_all(data)


PACKED = frames.pack({"event": "hello"})


@pytest.mark.parametrize("length", range(1, len(PACKED)))
def test_an_end_inside_a_pack(length):
    with pytest.raises(ProtocolError, match="inside a frame"):
        read_all(PACKED + PACKED[:length])


def test_an_end_between_frames():
    assert read_all(b"") == []
    assert read_all(PACKED) == [{"event": "hello"}]


@given(st.binary(max_size=200) | st.builds(raw, st.integers(0, 3), st.binary(max_size=100)))
@example(struct.pack("!IB", 2**32 - 1, 1))
@example(raw(1, b'{"n": ' + b"9" * 5000 + b"}"))
def test_random_bytes_are_frames_or_a_protocol_error(data):
    try:
        found = read_all(data)
    except ProtocolError:
        return
    assert all(isinstance(frame, (dict, Log)) for frame in found)


@given(messages)
def test_sparks_workers_pack_the_same(message):
    from distributor.channel.task import _pack

    assert _pack(message) == frames.pack(message)
