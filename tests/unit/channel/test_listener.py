"""Who may connect to the driver, and where it listens."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack, suppress

import pytest
import watch
from listeners import Listener, hello, refused, stranger, trusted

from distributor.channel import frames, listener as door
from distributor.channel.server import ChannelServer
from distributor.values import messages
from distributor.values.outcome import Log
from distributor.values.plan import Endpoint


def test_ports_of_a_range_are_tried_in_turn() -> None:
    with ChannelServer(Listener()) as first, ChannelServer(Listener()) as second, ChannelServer(Listener()) as third:
        start = first.listen("127.0.0.1", "127.0.0.1").port
        assert second.listen("127.0.0.1", "127.0.0.1", (start, start + 20)).port in range(start + 1, start + 21)
        with pytest.raises(OSError):
            third.listen("127.0.0.1", "127.0.0.1", (start, start))


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"x" * 32 + frames.pack(hello()), id="wrong-token"),
        pytest.param(frames.pack(hello()) * 2, id="no-token"),
        pytest.param(b"\xff" * 5000, id="garbage"),
        pytest.param(struct.pack("!IB", 2**32 - 1, 1) + bytes(64), id="huge-length"),
        pytest.param(bytes(32), id="zeros"),
    ],
)
def test_connections_without_the_token_are_refused(
    served: tuple[Listener, ChannelServer, Endpoint], sent: bytes
) -> None:
    listener, _, endpoint = served
    with stranger(endpoint) as connection:
        with suppress(OSError):
            connection.sendall(sent)
        assert refused(connection)
    assert (listener.events, listener.logs, listener.lost) == ([], [], [])


def test_a_silent_connection_ends_after_the_time_for_the_token(
    served: tuple[Listener, ChannelServer, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before TLS, and after it with half a token."""
    monkeypatch.setattr(door, "_HELLO_TIMEOUT", 1.0)
    listener, _, endpoint = served
    with socket.create_connection((endpoint.host, endpoint.port)) as bare, stranger(endpoint) as half:
        half.sendall(endpoint.token[:16])
        for connection in (bare, half):
            connection.settimeout(watch.DEADLINE)
            assert refused(connection)
    assert listener.events == []


def test_a_python_without_asyncios_inner_names_serves_with_larger_buffers(
    served: tuple[Listener, ChannelServer, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_SHRINKS", False)
    listener, _, endpoint = served
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(hello()))
        watch.until(lambda: listener.events)


def test_many_silent_connections_keep_no_node_out(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, _, endpoint = served
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((endpoint.host, endpoint.port)))
        connection = stack.enter_context(trusted(endpoint))
        connection.sendall(frames.pack(hello()))
        watch.until(lambda: listener.events)


def test_a_nodes_name_without_the_token_is_refused(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    """Who knows a node's name but not the token cannot take its place."""
    listener, _, endpoint = served
    with trusted(endpoint) as node:
        node.sendall(frames.pack(hello()))
        watch.until(lambda: listener.events)
        with stranger(endpoint) as thief:
            thief.sendall(bytes(32) + frames.pack(hello()) + frames.pack(messages.Failed(attempt=0)))
            assert refused(thief)
        node.sendall(frames.pack_log(Log(0, 1, 0, b"still here")))
        watch.until(lambda: listener.logs)
    assert len(listener.events) == 1


def test_secrets_are_not_shown(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    *_, endpoint = served
    assert endpoint.token.hex() not in repr(endpoint)
    assert repr(endpoint.token) not in repr(endpoint)
    assert "CERTIFICATE" not in repr(endpoint)
