"""An agent's end of the channel: heard, answered, and connected again."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import watch
from listeners import Listener, hello
from proxy import Proxy

from distributor.channel.node import Rhythm, Uplink, over_tls
from distributor.channel.server import ChannelServer
from distributor.display.console import Console
from distributor.display.logs import Logs
from distributor.values import messages
from distributor.values.outcome import Failure, Log
from distributor.values.plan import Endpoint


class Node:
    """An agent's side, which remembers what it was told."""

    def __init__(self, endpoint: Endpoint, name: str = "node-a", timeout: float = 30.0, interval: float = 0.05) -> None:
        self.orders: list[messages.Message] = []
        self.offsets: list[tuple[dict[tuple[int, int], int], bool]] = []
        self.given_up = False
        self.writers: list[asyncio.StreamWriter] = []
        dial = over_tls(endpoint)

        async def remembered() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await dial()
            self.writers.append(writer)
            return reader, writer

        self.uplink = Uplink(
            remembered,
            hello(name),
            self,
            Rhythm(timeout, interval, redial=True),
        )

    def on_order(self, order: messages.Message) -> None:
        self.orders.append(order)

    def on_offsets(self, offsets: dict[tuple[int, int], int], again: bool) -> None:
        self.offsets.append((offsets, again))

    def on_driver_lost(self) -> None:
        self.given_up = True

    def status(self) -> messages.Beat:
        return messages.Beat(1)


@asynccontextmanager
async def node(endpoint: Endpoint, **options: Any) -> Any:
    it = Node(endpoint, **options)
    await it.uplink.open()
    yield it


async def until(condition: Callable[[], Any]) -> None:
    end = asyncio.get_running_loop().time() + watch.DEADLINE
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 2 * watch.DEADLINE))


def test_a_node_with_the_token_is_heard(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, server, endpoint = served

    async def scene() -> None:
        async with node(endpoint) as a:
            await a.uplink.send_log(Log(3, 1, 0, b"a line\n"))
            server.stop("because")
            await until(lambda: a.orders)
            assert a.orders == [messages.Stop("because")]
            answer = await a.uplink.close()
            assert answer == messages.Farewell(((3, 1, 7),), True)
            assert a.offsets[-1] == ({(3, 1): 7}, False)
            assert not a.given_up

    play(scene())
    assert listener.logs == [Log(3, 1, 0, b"a line\n")]
    assert listener.events[0] == ("node-a", hello())
    assert listener.heard(messages.Bye)
    assert listener.lost == []


def test_an_order_reaches_nodes_that_come_later(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    _, server, endpoint = served
    server.stop("too late")

    async def scene() -> None:
        async with node(endpoint) as a:
            await until(lambda: a.orders)
            await a.uplink.close()

    play(scene())


def test_orders_on_attempts_reach_nodes_that_come_again(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, server, endpoint = served

    async def scene() -> None:
        async with node(endpoint) as a:
            await until(lambda: listener.heard(messages.Hello))
            server.stop("a rank failed")
            server.begin(1, 4000)
            await until(lambda: len(a.orders) == 2)
            a.writers[0].transport.abort()
            await until(lambda: len(a.orders) == 3)
            server.stop("another failed")
            server.end()
            await until(lambda: len(a.orders) == 5)
            a.writers[1].transport.abort()
            await until(lambda: len(a.orders) == 7)
            await a.uplink.close()
            begin, end = messages.Begin(1, 4000), messages.End()
            stops = [messages.Stop("a rank failed"), messages.Stop("another failed")]
            assert a.orders == [stops[0], begin, begin, stops[1], end, end, stops[1]]

    play(scene())


def test_messages_of_an_attempt_are_not_sent_again_in_the_next(
    served: tuple[Listener, ChannelServer, Endpoint],
) -> None:
    listener, _, endpoint = served

    async def scene() -> None:
        async with node(endpoint) as a:
            a.uplink.tell(messages.Failed(attempt=0))
            await until(lambda: listener.heard(messages.Failed))
            a.uplink.renew()
            a.uplink.tell(messages.Started(attempt=0))
            a.writers[0].transport.abort()
            await until(lambda: len(a.writers) == 2)
            await a.uplink.close()

    play(scene())
    assert len(listener.heard(messages.Failed)) == 1
    assert listener.heard(messages.Started)


def test_a_failure_that_is_told_again_is_older(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, _, endpoint = served
    loop_time = []

    async def scene() -> None:
        async with node(endpoint) as a:
            a.uplink.tell(messages.Failed(Failure(0, 0, "host-a", "exit", ""), 0.5, attempt=0))
            loop_time.append(asyncio.get_running_loop().time())
            await until(lambda: listener.heard(messages.Failed))
            loop_time.append(asyncio.get_running_loop().time())
            a.writers[0].transport.abort()
            await until(lambda: len(listener.heard(messages.Failed)) == 2)
            await a.uplink.close()

    play(scene())
    first, again = (
        message.age for _, message in listener.heard(messages.Failed) if isinstance(message, messages.Failed)
    )
    assert first == 0.5
    assert again >= first + loop_time[1] - loop_time[0]


def test_heartbeats_are_heard_and_answered(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, _, endpoint = served

    async def scene() -> None:
        async with node(endpoint) as a:
            await until(lambda: len(a.offsets) > 3)
            await a.uplink.close()

    play(scene())
    assert listener.heard(messages.Beat)[0] == ("node-a", messages.Beat(1))


def test_a_listener_that_fails_loses_no_node(
    served: tuple[Listener, ChannelServer, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a handler of the user's log raised an exception: the fault is the driver's."""
    listener, server, endpoint = served
    server._loop.set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    failures: list[Exception] = []
    heard = listener.on_message

    def on_message(name: str, message: messages.Message) -> None:
        heard(name, message)
        raise ValueError("of the driver")

    monkeypatch.setattr(listener, "on_message", on_message)

    async def scene() -> None:
        async with node(endpoint) as a:
            await until(lambda: len(a.offsets) > 3)
            await a.uplink.close()
            assert len(a.writers) == 1

    play(scene())
    assert {str(failure) for failure in failures} == {"of the driver"}
    assert listener.lost == []


def test_a_broken_connection_is_made_again_and_logs_go_on(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, server, endpoint = served

    async def scene() -> None:
        async with node(endpoint) as a:
            a.uplink.tell(messages.Started(attempt=0))
            await a.uplink.send_log(Log(0, 1, 0, b"first\n"))
            await until(lambda: listener.logs)
            a.writers[0].transport.abort()
            await until(lambda: len(a.writers) == 2)
            await a.uplink.send_log(Log(0, 1, 6, b"second\n"))
            assert ({(0, 1): 6}, True) in a.offsets  # where the driver is
            server.stop("now")
            await until(lambda: a.orders)
            await a.uplink.close()
            assert not a.given_up

    play(scene())
    assert [log.data for log in listener.logs] == [b"first\n", b"second\n"]
    assert len(listener.heard(messages.Started)) == 2  # told again: whether the first arrived, nobody knows
    assert listener.lost == []


def test_output_that_waited_for_the_next_connection_leaves_no_gap(
    served: tuple[Listener, ChannelServer, Endpoint],
) -> None:
    """A break has lost the first five bytes: the driver must have them before those that follow."""
    listener, _, endpoint = served

    async def scene() -> None:
        async with node(endpoint) as a:
            await until(lambda: a.offsets)
            a.writers[0].transport.abort()
            while a.uplink._welcome.is_set():
                await asyncio.sleep(0)
            await a.uplink.send_log(Log(0, 1, 5, b"second"))
            await a.uplink.send_log(Log(0, 1, 0, b"firstsecond"))
            await a.uplink.close()

    play(scene())
    assert listener.logs == [Log(0, 1, 0, b"firstsecond")]


def test_a_folder_for_logs_that_pauses_loses_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pauses for longer than nodes wait for the driver."""
    paused, goes_on, write = threading.Event(), threading.Event(), os.pwrite

    def pause(*arguments: Any) -> int:
        paused.set()
        goes_on.wait(watch.DEADLINE)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", pause)
    listener, logs = Listener(), Logs(Console(lambda rank: "host-a", ranks=()), tmp_path)
    monkeypatch.setattr(listener, "on_log", logs.take)
    with ChannelServer(listener, timeout=1.0) as server:
        endpoint = server.listen("127.0.0.1", "127.0.0.1")

        async def scene() -> None:
            async with node(endpoint, timeout=1.0) as a, node(endpoint, name="node-b", timeout=1.0) as b:
                await a.uplink.send_log(Log(0, 1, 0, b"a line\n"))
                await until(paused.is_set)
                await asyncio.sleep(2.5)
                assert not a.given_up and not b.given_up
                goes_on.set()
                await a.uplink.close()
                await b.uplink.close()

        play(scene())
    logs.close()
    assert listener.lost == []
    assert (tmp_path / "rank-0.stdout").read_bytes() == b"a line\n"


def test_both_sides_give_up_when_the_wire_is_cut() -> None:
    listener = Listener()
    with ChannelServer(listener, timeout=1.0) as server:
        endpoint = server.listen("127.0.0.1", "127.0.0.1")
        with Proxy(endpoint.host, endpoint.port) as wire:

            async def scene() -> None:
                async with node(replace(endpoint, port=wire.port), timeout=1.0) as a:
                    await until(lambda: listener.heard(messages.Beat))
                    wire.block()
                    await until(lambda: a.given_up)
                    await a.uplink.send_log(Log(0, 1, 0, b"does not wait for ever"))
                    assert await a.uplink.close() is None

            play(scene())
            watch.until(lambda: listener.lost)
    assert listener.lost == [("node-a", "nothing was heard from it for 1 s")]
    assert listener.logs == []


def test_a_node_learns_that_its_job_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to stop, hangs up, does not connect again, and needs no answer to its good-bye."""
    monkeypatch.setattr("distributor.channel.server._DISMISSAL", 600.0)
    listener = Listener()
    with ChannelServer(listener) as server:
        endpoint = server.listen("127.0.0.1", "127.0.0.1")

        async def scene() -> None:
            async with node(endpoint, interval=600.0) as a:  # no heartbeat to which the driver would hang up
                await until(lambda: listener.heard(messages.Hello))
                await asyncio.to_thread(server.retire)
                await until(lambda: a.orders)
                assert a.orders == [messages.Stop("the job has ended"), messages.End()]
                answer = await a.uplink.close()
                assert answer == messages.Farewell((), True)
                assert len(a.writers) == 1
                assert not a.given_up

        play(scene())
    assert listener.lost == []


def test_another_certificate_is_refused(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    _, _, endpoint = served
    with ChannelServer(Listener()) as other:
        elsewhere = other.listen("127.0.0.1", "127.0.0.1")
        forged = Endpoint(endpoint.host, endpoint.port, elsewhere.certificate, endpoint.token)
        with pytest.raises(ssl.SSLError):
            asyncio.run(Node(forged).uplink.open())


def test_a_driver_that_has_ended_is_an_oserror() -> None:
    with ChannelServer(Listener()) as server:
        endpoint = server.listen("127.0.0.1", "127.0.0.1")
    with pytest.raises(OSError):
        asyncio.run(Node(endpoint).uplink.open())


def test_many_frames_of_many_nodes_arrive_in_order(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, _, endpoint = served

    async def scene(number: int) -> None:
        async with node(endpoint, name=f"node-{number}") as it:
            offset = 0
            for line in range(200):
                data = b"%d\n" % line
                await it.uplink.send_log(Log(number, 1, offset, data))
                offset += len(data)
            await it.uplink.close()

    threads = [threading.Thread(target=lambda n=n: play(scene(n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(watch.DEADLINE)
    for number in range(8):
        assert [log.data for log in listener.logs if log.rank == number] == [b"%d\n" % line for line in range(200)]
    assert listener.lost == []
