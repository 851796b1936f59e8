"""Large return values of executors: over the channel, and through Spark where that fails. Spark brings their digest."""

from __future__ import annotations

import random
from typing import Any

import pytest
import watch
from proxy import Proxy
from sessions import Sessions

from distributor import Run, RunCancelledError, TorchDistributor
from distributor.channel.result_receiver import Arrived, ResultReceiver

pytestmark = pytest.mark.spark

SIZE = 24 << 20

#: Spark's default, in words: what the first session of a JVM sets holds for later ones that set nothing.
ROOM = {"spark.driver.maxResultSize": "1g"}


def content(rank: int, size: int = SIZE) -> bytes:
    return random.Random(rank).randbytes(size)


def value(size: int = SIZE) -> bytes:
    import os
    import random

    return random.Random(int(os.environ["RANK"])).randbytes(size)


def submit(function: Any, *args: Any, processes: int = 1, **options: Any) -> Run[Any]:
    return TorchDistributor(processes, False, False, **options).submit(function, *args)


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The bytes of the values that took the channel, by rank."""
    sizes: dict[int, int] = {}
    get = ResultReceiver.get

    def remember(self: ResultReceiver, rank: int) -> Arrived | None:
        value = get(self, rank)
        if value is not None:
            sizes[rank] = len(value.data)
        return value

    monkeypatch.setattr(ResultReceiver, "get", remember)
    return sizes


def test_large_values_take_the_channel(spark: Any, arrived: dict[int, int]) -> None:
    run = submit(value, processes=2)
    assert run.results(timeout=watch.DEADLINE) == [content(0), content(1)]
    assert all(SIZE < size < SIZE + 1000 for size in arrived.values())
    assert set(arrived) == {0, 1}
    watch.gone(run.id)


def test_small_values_come_through_spark(one_jvm: Any, arrived: dict[int, int]) -> None:
    assert submit(value, 100_000, processes=2).results(timeout=watch.DEADLINE) == [
        content(0, 100_000),
        content(1, 100_000),
    ]
    assert arrived == {}


@pytest.mark.long
def test_values_may_be_larger_than_sparks_limit(sessions: Sessions) -> None:
    sessions.get("local[2]", **{"spark.driver.maxResultSize": "1m"})
    assert submit(value).result(timeout=watch.DEADLINE) == content(0)


def test_a_value_whose_connection_breaks_is_sent_again(one_jvm: Any, arrived: dict[int, int], wire: Proxy) -> None:
    wire.stop_after(SIZE // 2, times=1)
    assert submit(value).result(timeout=watch.DEADLINE) == content(0)
    assert (wire.stopped, set(arrived)) == (1, {0})


@pytest.mark.parametrize("hang", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.long
def test_a_value_that_cannot_take_the_channel_comes_through_spark(
    sessions: Sessions, arrived: dict[int, int], wire: Proxy, hang: bool
) -> None:
    """Its connection breaks again and again, or is cut and nobody is told."""
    sessions.get("local[4]", **ROOM)
    wire.stop_after(SIZE // 2, hang=hang)
    run = submit(value, processes=2, heartbeat_timeout=5)
    assert run.results(timeout=watch.DEADLINE) == [content(0), content(1)]
    assert wire.stopped >= 2
    assert arrived == {}


@pytest.mark.slow
def test_a_driver_that_is_not_reached_gets_values_through_spark(
    sessions: Sessions, arrived: dict[int, int], unreachable: None
) -> None:
    sessions.get("local[4]", **ROOM)
    assert submit(value).result(timeout=watch.DEADLINE) == content(0)
    assert arrived == {}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_a_run_that_is_stopped_while_a_value_travels_ends(one_jvm: Any, wire: Proxy, how: str) -> None:
    """Long before the grace period of ranks, which have ended."""
    wire.stop_after(SIZE // 2, times=1, hang=True)
    run = submit(value, grace_period=10 * watch.DEADLINE)
    watch.until(lambda: wire.stopped)
    server = run._supervisor.server
    assert server is not None and server.receiver.coming == {0}
    getattr(run, how)()
    with pytest.raises(RunCancelledError):
        run.result(timeout=watch.DEADLINE)
    assert server.receiver.coming == set()
    watch.gone(run.id)
    assert submit(value, 1000).result(timeout=watch.DEADLINE) == content(0, 1000)
