"""What a node makes of the driver's orders on attempts."""

from __future__ import annotations

import asyncio

from distributor.node.attempt_orders import AttemptOrders
from distributor.values.messages import Begin, Dump, End, Message, Stop


def decided(restarts: AttemptOrders, *orders: Message) -> Begin | None:
    """What a node that waits learns from some orders."""

    async def wait() -> Begin | None:
        for order in orders:
            restarts.on_order(order)
        return await asyncio.wait_for(restarts.wait(), 1.0)

    return asyncio.run(wait())


def test_a_node_begins_when_it_is_told_to() -> None:
    restarts = AttemptOrders(2)
    assert restarts.possible
    assert decided(restarts, Begin(1, 4000)) == Begin(1, 4000)
    assert restarts.begun() is None


def test_an_order_that_comes_again_starts_nothing() -> None:
    restarts = AttemptOrders(3)
    decided(restarts, Begin(1, 4000))
    restarts.begun()
    assert decided(restarts, Begin(1, 4000), Begin(2, 4001)) == Begin(2, 4001)


def test_an_end_is_the_end() -> None:
    restarts = AttemptOrders(2)
    assert decided(restarts, Begin(1, 4000), End()) is None
    assert not restarts.possible
    assert not restarts.spare


def test_without_restarts_there_are_none() -> None:
    assert not AttemptOrders(0).possible


def test_the_last_attempt_keeps_no_spare() -> None:
    restarts = AttemptOrders(1)
    assert restarts.spare
    decided(restarts, Begin(1, 4000))
    restarts.begun()
    assert restarts.possible
    assert not restarts.spare


def test_a_stop_counts_for_the_attempt_that_comes_next() -> None:
    restarts = AttemptOrders(1)
    assert not restarts.on_order(Stop("now"))  # the current attempt's
    assert not restarts.on_order(Dump(1, True, 1.0))
    restarts.on_order(Begin(1, 4000))
    for stop in (Stop("soon"), Stop("at once", grace=False), Stop("later")):
        assert restarts.on_order(stop)
    assert restarts.begun() == Stop("at once", grace=False)
    assert not restarts.on_order(Stop("again"))


def test_the_ordered_attempt_counts_before_it_begins() -> None:
    restarts = AttemptOrders(3, 1)
    assert restarts.ordered == 1
    restarts.on_order(Begin(2, 4000))
    assert restarts.ordered == 2
    restarts.begun()
    assert restarts.ordered == 2
