"""Strangers at the channel's door while a run goes on behind it: they change nothing, and cost bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import ssl
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import trainings
import watch
from listeners import GROWTH, Listener, answer, growth_under, hello, refused, stranger, trusted
from sessions import Make, Sessions

from distributor import Status, TorchDistributor, TrainingError
from distributor.channel import frames, listener as door
from distributor.channel.result_receiver import ResultReceiver
from distributor.channel.server import ChannelServer
from distributor.channel.transfers import Transfers
from distributor.text.wording import size
from distributor.values import messages
from distributor.values.outcome import Log
from distributor.values.plan import Endpoint


@pytest.fixture
def served() -> Iterator[tuple[Listener, Endpoint]]:
    listener = Listener()
    with ChannelServer(listener) as server:
        yield listener, server.listen("127.0.0.1", "127.0.0.1")


def raw(message: Any) -> bytes:
    """A frame with any JSON object."""
    body = json.dumps(message).encode()
    return struct.pack("!IB", len(body), 1) + body


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"x" * 32 + frames.pack(hello()), id="wrong-token"),
        pytest.param(frames.pack(hello()) * 2, id="no-token"),
        pytest.param(b"\xff" * 5000, id="garbage"),
        pytest.param(struct.pack("!IB", 2**32 - 1, 1) + bytes(64), id="huge-length"),
        pytest.param(bytes(32), id="zeros"),
    ],
)
def test_who_has_no_token_is_turned_away(served: tuple[Listener, Endpoint], said: bytes) -> None:
    listener, endpoint = served
    with stranger(endpoint) as connection:
        with suppress(OSError):
            connection.sendall(said)
        assert refused(connection)
    assert (listener.events, listener.logs, listener.lost) == ([], [], [])


def test_who_stays_silent_is_turned_away_in_time(
    served: tuple[Listener, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before TLS, and after it with half a token."""
    monkeypatch.setattr(door, "_HELLO_TIMEOUT", 1.0)
    listener, endpoint = served
    with socket.create_connection((endpoint.host, endpoint.port)) as bare, stranger(endpoint) as half:
        half.sendall(endpoint.token[:16])
        for connection in (bare, half):
            connection.settimeout(watch.DEADLINE)
            assert refused(connection)
    assert listener.events == []


def test_a_python_without_asyncios_inner_names_serves_with_larger_buffers(
    served: tuple[Listener, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_SHRINKS", False)
    listener, endpoint = served
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(hello()))
        watch.until(lambda: listener.events)


def test_who_stays_silent_keeps_nobody_out(served: tuple[Listener, Endpoint]) -> None:
    listener, endpoint = served
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((endpoint.host, endpoint.port)))
        connection = stack.enter_context(trusted(endpoint))
        connection.sendall(frames.pack(hello()))
        watch.until(lambda: listener.events)


@pytest.mark.parametrize(
    "said",
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
def test_a_node_that_sends_nonsense_is_lost_and_others_are_not(served: tuple[Listener, Endpoint], said: bytes) -> None:
    bad_node(served, said, half=False)


def test_a_node_that_ends_inside_a_frame_is_lost(served: tuple[Listener, Endpoint]) -> None:
    bad_node(served, frames.pack_log(Log(0, 1, 0, b"x"))[:-1], half=True)
    assert served[0].lost == [("bad", "its agent ended without giving a reason")]


def bad_node(served: tuple[Listener, Endpoint], said: bytes, half: bool) -> None:
    listener, endpoint = served
    with trusted(endpoint) as good, trusted(endpoint) as bad:
        good.sendall(frames.pack(hello("good")))
        bad.sendall(frames.pack(hello("bad")))
        assert b"Welcome" in bad.recv(1000)
        bad.sendall(said)
        if half:
            bad.close()
        watch.until(lambda: listener.lost)
        good.sendall(frames.pack_log(Log(0, 1, 0, b"still here")))
        watch.until(lambda: listener.logs)
    assert listener.lost[0][0] == "bad"


def test_a_name_is_no_token(served: tuple[Listener, Endpoint]) -> None:
    """Who knows a node's name but not the token cannot take its place."""
    listener, endpoint = served
    with trusted(endpoint) as node:
        node.sendall(frames.pack(hello()))
        watch.until(lambda: listener.events)
        with stranger(endpoint) as thief:
            thief.sendall(bytes(32) + frames.pack(hello()) + frames.pack(messages.Failed()))
            assert refused(thief)
        node.sendall(frames.pack_log(Log(0, 1, 0, b"still here")))
        watch.until(lambda: listener.logs)
    assert len(listener.events) == 1


@pytest.fixture
def expecting() -> Iterator[tuple[ChannelServer, Endpoint]]:
    """A driver that expects the values of ranks 0 and 1, up to a mebibyte together."""
    with ChannelServer(Listener()) as server:
        server.returns = Transfers(ResultReceiver(limit=1 << 20))
        server.receiver.expect(range(2))
        yield server, server.listen("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    "said",
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
def test_a_value_that_nobody_expects_is_refused(expecting: tuple[ChannelServer, Endpoint], said: bytes) -> None:
    server, endpoint = expecting
    with trusted(endpoint) as connection:
        connection.sendall(said)
        assert answer(connection) is None
    assert server.receiver.coming == set()
    assert bring(endpoint, 1, b"as expected") == messages.Received()


def bring(endpoint: Endpoint, rank: int, data: bytes, size: int | None = None) -> messages.Message | None:
    """Announce a value and send other bytes, or as many. Returns the driver's last answer."""
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(messages.Value(rank, len(data) if size is None else size)))
        assert answer(connection) == messages.Proceed()
        connection.sendall(data)
        return answer(connection)


def test_who_has_no_token_brings_no_value(expecting: tuple[ChannelServer, Endpoint]) -> None:
    server, endpoint = expecting
    with stranger(endpoint) as connection:
        connection.sendall(bytes(32) + frames.pack(messages.Value(0, 10)) + bytes(10))
        assert refused(connection)
    assert server.receiver.get(0) is None


def test_what_follows_a_value_is_not_part_of_it(expecting: tuple[ChannelServer, Endpoint]) -> None:
    server, endpoint = expecting
    assert bring(endpoint, 0, b"value" + bytes(100), size=5) == messages.Received()
    arrived = server.receiver.get(0)
    assert arrived is not None
    assert (bytes(arrived.data), arrived.digest) == (b"value", hashlib.sha256(b"value").digest())


def test_a_value_that_ends_early_is_none(expecting: tuple[ChannelServer, Endpoint]) -> None:
    server, endpoint = expecting
    with trusted(endpoint) as connection:
        connection.sendall(frames.pack(messages.Value(0, 1 << 20)))
        assert answer(connection) == messages.Proceed()
        connection.sendall(bytes((1 << 20) - 1))
    watch.until(lambda: not server.receiver.coming)
    assert server.receiver.get(0) is None


def test_values_together_are_bounded(expecting: tuple[ChannelServer, Endpoint]) -> None:
    """What is there counts, and what is announced."""
    server, endpoint = expecting
    assert bring(endpoint, 0, bytes(600 << 10)) == messages.Received()
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


def test_a_rank_has_one_value_the_newest(expecting: tuple[ChannelServer, Endpoint]) -> None:
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


def test_a_value_holds_nobody_up(expecting: tuple[ChannelServer, Endpoint]) -> None:
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


def test_a_run_that_is_stopped_takes_no_value(expecting: tuple[ChannelServer, Endpoint]) -> None:
    server, endpoint = expecting
    with trusted(endpoint) as early:
        early.sendall(frames.pack(messages.Value(0, 100)))
        assert answer(early) == messages.Proceed()
        server.stop("cancelled")
        assert answer(early) is None
    with trusted(endpoint) as late:
        late.sendall(frames.pack(messages.Value(0, 100)))
        assert answer(late) == messages.Stop("cancelled")


def random_frame(source: random.Random) -> bytes:
    """Frames of every kind of wrong: lengths that lie, kinds that are not, JSON that is none, cut short."""
    body = source.randbytes(source.choice([0, 1, 13, 100, 2000]))
    length = source.choice([len(body), 0, len(body) + 1, source.getrandbits(32)])
    return struct.pack("!IB", length, source.choice([0, 1, 2, 3, 255])) + body


def attack(endpoint: tuple[str, int], seed: int, count: int) -> None:
    """So many random frames over as many connections as it takes: bare, and over TLS."""
    source = random.Random(seed)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sent = 0
    while sent < count:
        with suppress(OSError):
            connection: Any = socket.create_connection(endpoint, timeout=watch.DEADLINE)
            with connection:
                if source.random() < 0.5:
                    connection = context.wrap_socket(connection)
                for _ in range(50):
                    sent += 1
                    connection.sendall(random_frame(source))


@pytest.fixture
def port_of_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[str, int]]:
    """Where the run's driver listens."""
    seen = watch.endpoints(monkeypatch)
    return lambda: (watch.until(lambda: seen)[-1].host, seen[-1].port)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(20 * watch.DEADLINE)
@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_run_under_attack_completes(
    count: int,
    one_jvm: Any,
    port_of_run: Callable[[], tuple[str, int]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Random frames, silent connections and half a handshake, while ranks train, log and finish."""

    def train(go: str) -> float:
        total = trainings.all_reduce()
        trainings.wait_for(go)
        print("after the attack")
        return total

    run = TorchDistributor(2, False, False).submit(train, str(tmp_path / "go"))
    endpoint = port_of_run()
    watch.until(lambda: run.status is Status.RUNNING)
    with ExitStack() as silent:
        for _ in range(200):
            silent.enter_context(socket.create_connection(endpoint))
        attackers = [threading.Thread(target=attack, args=(endpoint, seed, count // 4)) for seed in range(4)]
        grown = growth_under(attackers, 10 * watch.DEADLINE)
        (tmp_path / "go").touch()
        assert run.results(timeout=watch.DEADLINE) == [3.0, 3.0]
    said = capfd.readouterr()
    assert said.out.count("after the attack") == 2
    assert "Traceback" not in said.err
    assert grown < GROWTH
    print(f"{count:,} frames without the token: the driver grew by at most {size(grown)}")


def test_secrets_are_not_shown(served: tuple[Listener, Endpoint]) -> None:
    _, endpoint = served
    assert endpoint.token.hex() not in repr(endpoint)
    assert repr(endpoint.token) not in repr(endpoint)
    assert "CERTIFICATE" not in repr(endpoint)


SECRET = "correct-horse-battery-staple"


def test_secrets_are_on_no_command_line_and_files_are_private(make: Make, tmp_path: Path) -> None:
    run = make(2, env={"API_KEY": SECRET}).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: run.status is Status.RUNNING)
    commands = [" ".join(process.cmdline()) for process in watch.processes(run.id)]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in watch.folders() if run.id in path.name]
    (tmp_path / "go").touch()
    run.result()
    assert len(commands) >= 4
    assert SECRET not in " ".join(commands) + repr(run) + repr(vars(run))
    assert set(modes) == {0o700}


@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_secrets_are_in_no_error(make: Make, tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="rank 1") as caught:
        make(2, env={"API_KEY": SECRET}).run(trainings.fail_on_rank_1, how, str(tmp_path / "stamp"))
    told = [str(caught.value), repr(caught.value), repr(vars(caught.value)), *capfd.readouterr()]
    assert SECRET not in " ".join(told)


@pytest.mark.spark
@pytest.mark.slow
def test_secrets_are_not_in_sparks_event_log_or_on_its_pages(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the Spark UI can show is what its event log holds."""
    seen = watch.endpoints(monkeypatch)
    (tmp_path / "events").mkdir()
    log = {"enabled": "true", "compress": "false", "dir": f"file://{tmp_path}/events"}
    sessions.get("local[2]", **{f"spark.eventLog.{name}": value for name, value in log.items()})
    TorchDistributor(2, False, False, env={"API_KEY": SECRET}).run(trainings.all_reduce)
    with pytest.raises(Exception, match="rank 1"):
        TorchDistributor(2, False, False, env={"API_KEY": SECRET}).run(
            trainings.fail_on_rank_1, "raise", str(tmp_path / "stamp")
        )
    sessions.stop()
    logged = b"".join(path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file())
    assert b"distributor-" in logged  # the job's tag: it is the right file
    assert SECRET.encode() not in logged
    assert len(seen) == 2
    for token in (endpoint.token for endpoint in seen):
        assert token.hex().encode() not in logged
        assert repr(token)[2:-1].encode() not in logged


def test_descriptors_of_strangers_are_given_back(served: tuple[Listener, Endpoint]) -> None:
    _, endpoint = served
    before = watch.open_descriptors()
    attack((endpoint.host, endpoint.port), seed=os.getpid(), count=500)
    watch.until(lambda: watch.open_descriptors() <= before)


def test_gloo_has_no_encryption_to_use(make_local: Make) -> None:
    """What the README says of it: a torch that can do better fails this test."""
    with pytest.raises(TrainingError, match="unsupported gloo device"):
        make_local(1, env={"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}).run(trainings.all_reduce)
