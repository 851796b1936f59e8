"""The frames of the channel."""

import asyncio
import itertools
import json
import struct
import sys

import pytest
from hypothesis import example, given, strategies as st

from distributor.channel import frames
from distributor.channel.frames import ProtocolError
from distributor.values import messages
from distributor.values.messages import (
    AllNodes,
    Beat,
    Bye,
    Dump,
    Failed,
    Hello,
    Message,
    Stop,
    TaskFacts,
    Warnings,
    Welcome,
)
from distributor.values.outcome import Failure, Log
from distributor.values.placement import Node, NodeFacts

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
numbers = st.integers(0, 2**63 - 1)
nodes = st.builds(Node, numbers, st.text(), st.text(), st.text(), *[numbers] * 4, gpus=st.tuples(st.text()))
versions = st.dictionaries(st.text(), st.text(), max_size=2)
facts = st.builds(NodeFacts, numbers, st.text(), st.text(), st.text(), numbers, versions=versions)
sent_messages = st.one_of(
    st.builds(TaskFacts, st.text(), numbers, st.text(), facts),
    st.builds(AllNodes, st.tuples(nodes)),
    st.builds(Hello, st.text(), st.text(), st.text()),
    st.builds(Beat, numbers, st.none() | st.floats(0, 1e300)),
    st.builds(Warnings, st.text(), st.tuples(st.text())),
    st.builds(
        Failed, st.none() | st.builds(Failure, numbers, numbers, st.text(), st.text(), st.text()), attempt=numbers
    ),
    st.builds(Welcome, st.tuples(st.tuples(numbers, numbers, numbers))),
    st.builds(Dump, numbers, st.booleans(), st.floats(-1e300, 1e300)),
)
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


@given(st.lists(sent_messages | logs, max_size=5), st.data())
def test_round_trip(sent, data):
    packed = b"".join(map(pack, sent))
    cuts = data.draw(st.lists(st.integers(0, len(packed)), max_size=4))
    assert read_all(packed, cuts) == sent


def test_the_largest_pieces_pass():
    log = Log(3, 2, 0, bytes(frames.MAX_LOG))
    message = Stop("x" * (frames.MAX_BODY - len(json.dumps(messages.encode(Stop(""))))))
    assert read_all(frames.pack_log(log) + frames.pack(message)) == [log, message]


def test_a_message_longer_than_a_frame_is_not_packed():
    with pytest.raises(ProtocolError, match="longer"):
        frames.pack(Stop("x" * frames.MAX_BODY))


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
        pytest.param(raw(0, b"{}"), "data of the unknown kind", id="kind-0"),
        pytest.param(raw(3, b"{}"), "data of the unknown kind", id="kind-3"),
        pytest.param(raw(1, b""), "not a message", id="empty"),
        pytest.param(raw(1, b"{"), "the sender sends data that is not a message", id="cut-json"),
        pytest.param(raw(1, b"\xff\xfe\xfa"), "not a message", id="not-text"),
        pytest.param(raw(1, b"[1]"), "no message of kind None", id="list"),
        pytest.param(raw(1, b"null"), "no message of kind None", id="null"),
        pytest.param(raw(2, b"\0\0\0\1"), "a piece of output without rank, stream and offset", id="short-log"),
        pytest.param(raw(1, b'{"a":' + b"[" * 100_000), "values that are nested more than 32 deep", id="deeply-nested"),
        pytest.param(raw(1, b"[" * (4 << 20)), "the JSON contains more than 262144 values", id="only-nesting"),
        pytest.param(
            raw(1, b"[" + b"1," * 300_000 + b"1]"), "the JSON contains more than 262144 values", id="many-numbers"
        ),
        pytest.param(
            raw(1, b"[" + b'"a",' * 300_000 + b"1]"), "the JSON contains more than 262144 values", id="many-texts"
        ),
        pytest.param(raw(1, b'{"a": "' + b"x" * 300_000), "not a message", id="text-without-end"),
        pytest.param(
            raw(1, b'{"n": ' + b"9" * 100 + b"}"),
            "the JSON contains a number with 100 digits, which is too many",
            id="many-digits",
        ),
        pytest.param(raw(1, b'{"n": NaN}'), "the JSON contains NaN, which is not allowed", id="nan"),
        pytest.param(
            raw(1, b'{"kind": "Bye", "kind": "Bye"}'), "a JSON object contains the same field twice", id="field-twice"
        ),
        pytest.param(raw(1, '{"kind": "Bye"}'.encode("utf-16")), "not a message", id="utf-16"),
    ],
)
def test_invalid_frames_are_protocol_errors(data, message):
    with pytest.raises(ProtocolError, match=message):
        read_all(data)


def test_brackets_in_a_text_are_no_nesting():
    warning = Warnings("host", ('[{"' * 100_000,))
    assert read_all(frames.pack(warning)) == [warning]


def test_nesting_is_found_whatever_the_recursion_limit():
    """A parser that uses the stack would crash."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        with pytest.raises(ProtocolError, match="values that are nested more than 32 deep"):
            read_all(raw(1, b'{"a":' * 100_000))
    finally:
        sys.setrecursionlimit(before)


def test_the_first_frame_may_be_bounded_further():
    async def run():
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack("!IB", 1001, 1))
        await asyncio.wait_for(frames.read(reader, 1000), 30)

    why = "the sender announces a message of 1001 bytes, which is longer than the maximum of 1000 bytes"
    with pytest.raises(ProtocolError, match=why):
        asyncio.run(run())


PACKED = frames.pack(Bye())


@pytest.mark.parametrize("length", range(1, len(PACKED)))
def test_an_end_inside_a_frame(length):
    with pytest.raises(ProtocolError, match="inside a frame, before a whole message had arrived"):
        read_all(PACKED + PACKED[:length])


def test_an_end_between_frames():
    assert read_all(b"") == []
    assert read_all(PACKED) == [Bye()]


@given(st.binary(max_size=200) | st.builds(raw, st.integers(0, 3), st.binary(max_size=100)))
@example(struct.pack("!IB", 2**32 - 1, 1))
@example(raw(1, b'{"n": ' + b"9" * 5000 + b"}"))
def test_random_bytes_are_frames_or_a_protocol_error(data):
    try:
        found = read_all(data)
    except ProtocolError:
        return
    assert all(isinstance(frame, (Message, Log)) for frame in found)


@given(sent_messages)
def test_sparks_workers_pack_the_same(message):
    from distributor.channel.connections import pack as _pack

    assert _pack(message) == frames.pack(message)


def test_lone_surrogates_are_escaped() -> None:
    """No log and no file could hold them."""
    told = Warnings("host \udce4", ("half a \ud800 character", "a whole \U0001f600"))
    assert read_all(frames.pack(told)) == [Warnings("host \\udce4", ("half a \\ud800 character", "a whole \U0001f600"))]
