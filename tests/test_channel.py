"""The channel and those who should not be on it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trainings
import watch
from sessions import Make, Sessions

from distributor import Status, TorchDistributor
from distributor.channel import frames
from distributor.channel.frames import Log
from distributor.channel.node import Endpoint, connect
from distributor.channel.server import ChannelServer


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lost: list[str] = []

    def on_log(self, log: Log) -> None:
        self.logs.append(log)

    def on_event(self, node: str, event: dict[str, Any]) -> None:
        self.events.append((node, event))

    def on_lost(self, node: str) -> None:
        self.lost.append(node)


@pytest.fixture
def served() -> Iterator[tuple[Listener, ChannelServer, Endpoint]]:
    listener = Listener()
    with ChannelServer(listener) as server:
        yield listener, server, server.listen("127.0.0.1", "127.0.0.1")


HELLO = {"event": "hello", "node": "node-a", "placement": []}


def test_a_node_with_the_token_is_heard(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, server, endpoint = served

    async def talk() -> list[dict[str, Any]]:
        uplink = await connect(endpoint)
        orders: list[dict[str, Any]] = []
        listening = asyncio.ensure_future(uplink.listen(orders.append))
        uplink.send(HELLO)
        await uplink.send_log(Log(3, 1, b"a line\n"))
        server.stop("because")
        while not orders:
            await asyncio.sleep(0.01)
        await uplink.say_bye()
        await listening
        return orders

    assert asyncio.run(talk()) == [{"order": "stop", "reason": "because"}]
    assert listener.logs == [Log(3, 1, b"a line\n")]
    assert listener.events == [("node-a", HELLO)]
    assert listener.lost == []


def test_a_node_that_leaves_without_a_word_is_lost(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, _, endpoint = served

    async def talk() -> None:
        uplink = await connect(endpoint)
        uplink.send(HELLO)
        uplink._writer.close()

    asyncio.run(talk())
    watch.until(lambda: listener.lost == ["node-a"])


def stranger(endpoint: Endpoint) -> ssl.SSLSocket:
    """A connection that accepts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection((endpoint.host, endpoint.port), timeout=watch.DEADLINE))


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"x" * 32 + frames.pack(HELLO), id="wrong-token"),
        pytest.param(frames.pack(HELLO), id="no-token"),
        pytest.param(b"\xff" * 5000, id="garbage"),
        pytest.param(b"\xff" * 7, id="half-a-token"),
    ],
)
def test_strangers_are_turned_away(served: tuple[Listener, ChannelServer, Endpoint], said: bytes) -> None:
    listener, _, endpoint = served
    with stranger(endpoint) as connection:
        connection.sendall(said)
        connection.settimeout(watch.DEADLINE)
        if len(said) >= 32:
            try:
                assert connection.recv(1) == b""
            except OSError:
                pass
    assert (listener.events, listener.logs, listener.lost) == ([], [], [])


def test_what_is_no_frame_ends_the_connection(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, _, endpoint = served
    with stranger(endpoint) as connection:
        connection.sendall(endpoint.token + frames.pack(HELLO) + b"\xff" * 100)
        watch.until(lambda: listener.lost == ["node-a"])


def test_another_certificate_is_refused(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    _, _, endpoint = served
    with ChannelServer(Listener()) as other:
        elsewhere = other.listen("127.0.0.1", "127.0.0.1")
        forged = Endpoint(endpoint.host, endpoint.port, elsewhere.certificate, endpoint.token)
        with pytest.raises(ssl.SSLError):
            asyncio.run(connect(forged))


def test_secrets_are_not_shown(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    _, _, endpoint = served
    assert endpoint.token.hex() not in repr(endpoint)
    assert repr(endpoint.token) not in repr(endpoint)
    assert "CERTIFICATE" not in repr(endpoint)


def test_secrets_are_on_no_command_line_and_files_are_private(make_local: Make, tmp_path: Path) -> None:
    secret = "correct-horse-battery-staple"
    run = make_local(2, env={"API_KEY": secret}).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: run.status is Status.RUNNING)
    commands = [" ".join(process.cmdline()) for process in watch.processes(run.id)]
    (folder,) = [path for path in watch.folders() if run.id in path.name]
    mode = stat.S_IMODE(folder.stat().st_mode)
    (tmp_path / "go").touch()
    run.result()
    assert len(commands) == 4
    assert secret not in " ".join(commands) + repr(run) + repr(vars(run))
    assert mode == 0o700


@pytest.mark.spark
def test_the_driver_listens_on_sparks_address_only(sessions: Sessions, tmp_path: Path) -> None:
    import psutil

    sessions.get("local[2]", **{"spark.driver.host": "127.0.0.1"})
    run = TorchDistributor(2, False, False).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: run.status is Status.RUNNING)
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    (tmp_path / "go").touch()
    run.result()
    assert listening
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


def test_many_frames_of_many_nodes_arrive_in_order(served: tuple[Listener, ChannelServer, Endpoint]) -> None:
    listener, _, endpoint = served

    async def node(number: int) -> None:
        uplink = await connect(endpoint)
        listening = asyncio.ensure_future(uplink.listen(lambda _: None))
        uplink.send({**HELLO, "node": f"node-{number}"})
        for line in range(200):
            await uplink.send_log(Log(number, 1, b"%d\n" % line))
        await uplink.say_bye()
        await listening

    threads = [threading.Thread(target=lambda n=n: asyncio.run(node(n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(watch.DEADLINE)
    for number in range(8):
        assert [log.data for log in listener.logs if log.rank == number] == [b"%d\n" % line for line in range(200)]
    assert listener.lost == []
