"""The line between an agent and who started it."""

import os
import pickle
import socket
import struct
import threading

import pytest
from hypothesis import given, strategies as st

from distributor.channel import control


@pytest.fixture
def line():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([{"report": b"\0\1", "values": {0: "path"}}], id="one"),
        pytest.param([None, [], "text", {"a": (1, 2.5)}], id="several"),
        # More than a socket's buffers: the sender is still at it while the receiver reads.
        pytest.param([{"job": os.urandom(1 << 16) * 200}, "after"], id="large"),
    ],
)
def test_round_trip(line, messages):
    ours, theirs = line

    def send_all():
        for message in messages:
            control.send(theirs, message)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [control.receive(ours) for _ in messages] == messages
    sender.join()


MESSAGE = pickle.dumps({"text": "x" * 20}, protocol=5)
PACKED = struct.pack("!Q", len(MESSAGE)) + MESSAGE


def test_the_wire_format():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            control.send(theirs, {"text": "x" * 20})
        assert ours.recv(1 << 12) == PACKED


@given(st.integers(0, len(PACKED) - 1))
def test_an_end_before_the_end_of_a_message(length):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(PACKED + PACKED[:length])
        assert control.receive(ours) == {"text": "x" * 20}
        assert control.receive(ours) is None
        assert control.receive(ours) is None


def test_a_reset_is_an_end(line):
    ours, theirs = line
    ours.sendall(b"unread")
    theirs.close()  # with something unread: the kernel resets the connection
    assert control.receive(ours) is None


def test_sending_to_a_closed_socket_is_an_oserror(line):
    ours, theirs = line
    theirs.close()
    with pytest.raises(OSError):
        control.send(ours, "hello")
