"""The driver's end of the channel, and nodes that misbehave."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import watch
from listeners import Listener, hello, trusted

from distributor.channel import frames
from distributor.channel.server import ChannelServer
from distributor.values.outcome import Log
from distributor.values.plan import Endpoint


def test_a_node_that_disconnects_without_bye_is_lost(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, _, endpoint = served

    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(hello()))
        assert b"Welcome" in connection.recv(1000)  # what is unread would make its end a break of the connection
    watch.until(lambda: listener.lost == [("node-a", "its agent ended without giving a reason")])


def test_a_silent_node_is_lost() -> None:
    listener = Listener()
    with ChannelServer(listener, timeout=0.5) as server:
        with trusted(server.listen("127.0.0.1", "127.0.0.1")) as connection:
            connection.sendall(frames.pack(hello()))
            watch.until(lambda: listener.lost == [("node-a", "nothing was heard from it for 0.5 s")])


def test_a_node_that_does_not_read_holds_up_no_end() -> None:
    with ChannelServer(Listener()) as server:
        connection = trusted(server.listen("127.0.0.1", "127.0.0.1"))
        connection.sendall(frames.pack(hello()))
        watch.until(lambda: server.reached)
    connection.close()


def test_bytes_that_are_no_frame_end_the_connection(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, _, endpoint = served
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(hello()) + b"\xff" * 100)
        watch.until(lambda: listener.lost)
    assert listener.lost[0][1].startswith("it sent an invalid message (the sender announces a message of ")


def raw(message: Any) -> bytes:
    """A frame with any JSON object."""
    body = json.dumps(message).encode()
    return struct.pack("!IB", len(body), 1) + body


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(struct.pack("!IB", 2**32 - 1, 1), id="huge-length"),
        pytest.param(struct.pack("!IB", frames.MAX_BODY + 1, 2), id="too-long"),
        pytest.param(struct.pack("!IB", 0, 77), id="unknown-kind"),
        pytest.param(struct.pack("!IB", 3, 2) + b"abc", id="short-log"),
        pytest.param(struct.pack("!IB", 2, 1) + b"[]", id="no-object"),
        pytest.param(struct.pack("!IB", 100_000, 1) + b"[" * 100_000, id="deep"),
        pytest.param(raw({"no": "kind"}), id="no-kind"),
        pytest.param(raw({"kind": "Beat", "alive": "2"}), id="wrong-type"),
        pytest.param(raw({"kind": "Beat", "dead": 2}), id="unknown-field"),
    ],
)
def test_a_node_that_sends_an_invalid_frame_is_lost_alone(
    served: tuple[Listener, ChannelServer, Endpoint], sent: bytes
) -> None:
    bad_node(served, sent, half=False)


def test_a_node_that_ends_inside_a_frame_is_lost(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    bad_node(served, frames.pack_log(Log(0, 1, 0, b"x"))[:-1], half=True)
    assert served[0].lost == [("bad", "its agent ended without giving a reason")]


def bad_node(served: tuple[Listener, ChannelServer, Endpoint], sent: bytes, half: bool) -> None:
    listener, _, endpoint = served
    with trusted(endpoint) as good, trusted(endpoint) as bad:
        good.sendall(frames.pack(hello("good")))
        bad.sendall(frames.pack(hello("bad")))
        assert b"Welcome" in bad.recv(1000)
        bad.sendall(sent)
        if half:
            bad.close()
        watch.until(lambda: listener.lost)
        good.sendall(frames.pack_log(Log(0, 1, 0, b"still here")))
        watch.until(lambda: listener.logs)
    assert listener.lost[0][0] == "bad"
