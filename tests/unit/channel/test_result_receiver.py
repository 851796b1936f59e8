"""What nodes bring back over the channel: when it is complete, and when nobody waits for it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import watch
from listeners import GROWTH, Listener, answer, hello, refused, stranger, trusted

from distributor.channel import frames, result_receiver as module
from distributor.channel.result_receiver import Arrived, ResultReceiver
from distributor.channel.server import ChannelServer
from distributor.channel.transfers import Transfers
from distributor.values import messages
from distributor.values.messages import Finished, Value
from distributor.values.outcome import Collected, NodeReport, Outcome
from distributor.values.plan import Endpoint

A = NodeReport(0, "host-a", (Outcome(0, "host-a", "finished"), Outcome(1, "host-a", "finished")))
B = NodeReport(1, "host-b", (Outcome(2, "host-b", "finished"),))


def returned(
    finished: dict[str, Finished], nodes: tuple[str, ...] | None = ("a", "b"), hopeless: bool = False, **arrived: bytes
) -> Collected | None:
    """What a driver gets that expects the values of three ranks on two nodes, and waits for 0.1 s."""
    receiver = ResultReceiver()
    receiver.expect(range(3))
    for rank, data in arrived.items():
        receiver._arrived[int(rank.removeprefix("rank_"))] = Arrived(memoryview(data), hashlib.sha256(data).digest())
    returns = Transfers(receiver)
    for node, message in finished.items():
        returns.note(node, message)
    return asyncio.run(returns.wait(lambda: nodes, lambda: hopeless, 0.1))


def test_results_of_all_nodes_are_returned() -> None:
    both = {"b": Finished(B, ((2, "QUI="),)), "a": Finished(A, (), (0, 1))}
    found = returned(both, rank_0=b"zero", rank_1=b"one")
    assert found is not None
    assert found.reports == (A, B)
    assert {rank: b"".join(pieces) for rank, pieces in found.values.items()} == {0: b"zero", 1: b"one", 2: b"AB"}
    assert returned(both, hopeless=True, rank_0=b"zero", rank_1=b"one") is not None


def test_results_are_freed() -> None:
    receiver = ResultReceiver()
    receiver.expect(range(1))
    receiver._arrived[0] = Arrived(memoryview(b"value"), b"")
    returns = Transfers(receiver)
    returns.note("a", Finished(A))
    assert receiver.get(0) is not None and returns
    asyncio.run(returns.clear())
    assert (receiver.get(0), receiver.received, bool(returns)) == (None, 0, False)


def test_results_that_cannot_arrive_are_not_awaited() -> None:
    both: dict[str, Any] = {"a": Finished(A), "b": Finished(B)}
    assert returned(both) is not None
    assert returned({"a": Finished(A)}) is None
    assert returned({"a": Finished(A)}, hopeless=True) is None
    assert returned(both, nodes=None) is None
    assert returned({**both, "a": Finished(A, (), (0,))}) is None
    assert returned({**both, "a": Finished(A, (), (0,))}, rank_0=b"zero") is not None


@pytest.mark.parametrize("arrived", [0, 10, module._STEP])
def test_a_value_whose_connection_ends_before_its_last_byte_is_forgotten(arrived: int) -> None:
    """Also if bytes to hash arrive just before the end."""
    protocols: list[Any] = []
    writer: Any = SimpleNamespace(transport=SimpleNamespace(set_protocol=protocols.append), write=lambda _: None)

    async def lose() -> ResultReceiver:
        receiver = ResultReceiver()
        receiver.expect(range(1))
        received = asyncio.create_task(receiver.receive(Value(0, module._STEP + 1), writer))
        while not protocols:
            await asyncio.sleep(0)
        if arrived:
            protocols[0].buffer_updated(arrived)
        protocols[0].connection_lost(None)
        with pytest.raises(ConnectionError, match="ended before all bytes of a rank's return value had arrived"):
            await asyncio.wait_for(received, watch.DEADLINE)
        return receiver

    receiver = asyncio.run(lose())
    assert (receiver.coming, receiver.received) == (set(), 0)


def raw(message: Any) -> bytes:
    """A frame with any JSON object."""
    body = json.dumps(message).encode()
    return struct.pack("!IB", len(body), 1) + body


@pytest.fixture
def expecting() -> Iterator[tuple[ChannelServer, Endpoint]]:
    """A driver that expects the values of ranks 0 and 1, up to a mebibyte together."""
    with ChannelServer(Listener()) as server:
        server.returns = Transfers(ResultReceiver(limit=1 << 20))
        server.receiver.expect(range(2))
        yield server, server.listen("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(frames.pack(messages.Value(2, 10)), id="rank-without-value"),
        pytest.param(frames.pack(messages.Value(-1, 10)), id="no-rank"),
        pytest.param(frames.pack(messages.Value(0, 0)), id="empty"),
        pytest.param(frames.pack(messages.Value(0, -1)), id="negative"),
        pytest.param(frames.pack(messages.Value(0, (1 << 20) + 1)), id="too-large"),
        pytest.param(frames.pack(messages.Value(0, 1 << 62)), id="absurd"),
        pytest.param(frames.pack(messages.Value(0, 10**4000)), id="no-machine-word"),
        pytest.param(raw({"kind": "Value", "rank": 0}), id="no-size"),
        pytest.param(raw({"kind": "Value", "rank": True, "size": 10}), id="wrong-type"),
        pytest.param(raw({"kind": "Value", "rank": 0, "size": 10, "path": "/etc/passwd"}), id="unknown-field"),
        pytest.param(frames.pack(messages.Proceed()), id="wrong-way"),
    ],
)
def test_an_unexpected_value_is_refused(expecting: tuple[ChannelServer, Endpoint], sent: bytes) -> None:
    server, endpoint = expecting
    with trusted(endpoint) as connection:
        connection.sendall(sent)
        assert answer(connection) is None
    assert server.receiver.coming == set()
    assert send_value(endpoint, 1, b"as expected") == messages.Received()


def send_value(endpoint: Endpoint, rank: int, data: bytes, size: int | None = None) -> messages.Message | None:
    """Announce a value and send other bytes, or as many. Returns the driver's last answer."""
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(messages.Value(rank, len(data) if size is None else size)))
        assert answer(connection) == messages.Proceed()
        connection.sendall(data)
        return answer(connection)


def test_a_value_without_the_token_is_refused(expecting: tuple[ChannelServer, Endpoint]) -> None:
    server, endpoint = expecting
    with stranger(endpoint) as connection:
        connection.sendall(bytes(32) + frames.pack(messages.Value(0, 10)) + bytes(10))
        assert refused(connection)
    assert server.receiver.get(0) is None


def test_bytes_after_a_value_are_dropped(expecting: tuple[ChannelServer, Endpoint]) -> None:
    server, endpoint = expecting
    assert send_value(endpoint, 0, b"value" + bytes(100), size=5) == messages.Received()
    arrived = server.receiver.get(0)
    assert arrived is not None
    assert (bytes(arrived.data), arrived.digest) == (b"value", hashlib.sha256(b"value").digest())


def test_an_incomplete_value_is_dropped(expecting: tuple[ChannelServer, Endpoint]) -> None:
    server, endpoint = expecting
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(messages.Value(0, 1 << 20)))
        assert answer(connection) == messages.Proceed()
        connection.sendall(bytes((1 << 20) - 1))
    watch.until(lambda: not server.receiver.coming)
    assert server.receiver.get(0) is None


def test_all_values_together_are_bounded_announced_ones_too(expecting: tuple[ChannelServer, Endpoint]) -> None:
    """What is there counts, and what is announced."""
    server, endpoint = expecting
    assert send_value(endpoint, 0, bytes(600 << 10)) == messages.Received()
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(messages.Value(1, 600 << 10)))
        assert answer(connection) is None
    with trusted(endpoint) as slow, trusted(endpoint) as other:
        slow.sendall(frames.pack(messages.Value(0, 600 << 10)))
        assert answer(slow) == messages.Proceed()
        other.sendall(frames.pack(messages.Value(1, 600 << 10)))
        assert answer(other) is None
        assert server.receiver.coming == {0}
    watch.until(lambda: not server.receiver.coming)


def test_a_rank_has_only_its_newest_value(expecting: tuple[ChannelServer, Endpoint]) -> None:
    """Who announces hundreds makes the driver hold one."""
    server, endpoint = expecting
    with ExitStack() as stack:
        connections = [stack.enter_context(trusted(endpoint)) for _ in range(20)]
        for connection in connections:
            connection.sendall(frames.pack(messages.Value(0, 1 << 20)))
            assert answer(connection) == messages.Proceed()
        assert all(answer(connection) is None for connection in connections[:-1])
        connections[-1].sendall(bytes(1 << 20))
        assert answer(connections[-1]) == messages.Received()
    arrived = server.receiver.get(0)
    assert arrived is not None and len(arrived.data) == 1 << 20
    server.forget_returned()
    assert server.receiver.get(0) is None


def test_memory_is_used_as_a_value_arrives(expecting: tuple[ChannelServer, Endpoint]) -> None:
    server, endpoint = expecting
    server.returns = Transfers(ResultReceiver(limit=64 << 30))
    server.receiver.expect(range(2))
    before = psutil.Process().memory_info().rss
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(messages.Value(0, 8 << 30)))
        assert answer(connection) == messages.Proceed()
        connection.sendall(bytes(1 << 20))
        assert psutil.Process().memory_info().rss - before < GROWTH


def test_other_nodes_are_answered_while_a_value_arrives(expecting: tuple[ChannelServer, Endpoint]) -> None:
    """A node is heard and answered while another brings a value."""
    server, endpoint = expecting
    with trusted(endpoint) as node, trusted(endpoint) as bringing:
        bringing.sendall(frames.pack(messages.Value(0, 1 << 20)))
        assert answer(bringing) == messages.Proceed()
        bringing.sendall(bytes(1 << 19))
        node.sendall(frames.pack(hello()) + frames.pack(messages.Beat(1)))
        assert isinstance(answer(node), messages.Welcome)
        assert isinstance(answer(node), messages.BeatHeard)
        assert server.receiver.coming == {0}
        bringing.sendall(bytes(1 << 19))
        assert answer(bringing) == messages.Received()


def test_a_stopped_run_takes_no_value(expecting: tuple[ChannelServer, Endpoint]) -> None:
    server, endpoint = expecting
    with trusted(endpoint) as early:
        early.sendall(frames.pack(messages.Value(0, 100)))
        assert answer(early) == messages.Proceed()
        server.stop("cancelled")
        assert answer(early) is None
    with trusted(endpoint) as late:
        late.sendall(frames.pack(messages.Value(0, 100)))
        assert answer(late) == messages.Stop("cancelled")
