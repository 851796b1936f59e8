"""What nodes bring back over the channel: when it is complete, and when nobody waits for it."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import watch

from distributor.channel import result_receiver as module
from distributor.channel.result_receiver import Arrived, ResultReceiver
from distributor.channel.transfers import Transfers
from distributor.values.messages import Finished, Value
from distributor.values.outcome import Collected, NodeReport, Outcome

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


def test_all_that_nodes_bring_back_is_there() -> None:
    both = {"b": Finished(B, ((2, "QUI="),)), "a": Finished(A, (), (0, 1))}
    found = returned(both, rank_0=b"zero", rank_1=b"one")
    assert found is not None
    assert found.reports == (A, B)
    assert {rank: b"".join(pieces) for rank, pieces in found.values.items()} == {0: b"zero", 1: b"one", 2: b"AB"}
    assert returned(both, hopeless=True, rank_0=b"zero", rank_1=b"one") is not None


def test_what_was_brought_is_forgotten() -> None:
    receiver = ResultReceiver()
    receiver.expect(range(1))
    receiver._arrived[0] = Arrived(memoryview(b"value"), b"")
    returns = Transfers(receiver)
    returns.note("a", Finished(A))
    assert receiver.get(0) is not None and returns
    asyncio.run(returns.clear())
    assert (receiver.get(0), receiver.received, bool(returns)) == (None, 0, False)


def test_what_does_not_come_is_not_waited_for() -> None:
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
