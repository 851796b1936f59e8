"""Connections without the token while a run trains, and secrets that must not be shown."""

from __future__ import annotations

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

import pytest
import trainings
import watch
from listeners import GROWTH, Listener, growth_under
from sessions import Make, Sessions

from distributor import Status, TorchDistributor, TrainingError
from distributor.channel.server import ChannelServer
from distributor.text.wording import size
from distributor.values.plan import Endpoint


@pytest.fixture
def served() -> Iterator[tuple[Listener, Endpoint]]:
    listener = Listener()
    with ChannelServer(listener) as server:
        yield listener, server.listen("127.0.0.1", "127.0.0.1")


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


SECRET = "correct-horse-battery-staple"


@pytest.mark.long_on_executors
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
@pytest.mark.long_on_executors
def test_secrets_are_in_no_error(make: Make, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="rank 1") as caught:
        make(2, env={"API_KEY": SECRET}).run(trainings.fail_on_rank_1, how)
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
        TorchDistributor(2, False, False, env={"API_KEY": SECRET}).run(trainings.fail_on_rank_1, "raise")
    sessions.stop()
    logged = b"".join(path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file())
    assert b"distributor-" in logged  # the job's tag: it is the right file
    assert SECRET.encode() not in logged
    assert len(seen) == 2
    for token in (endpoint.token for endpoint in seen):
        assert token.hex().encode() not in logged
        assert repr(token)[2:-1].encode() not in logged


def test_connections_without_the_token_leave_no_descriptor_open(served: tuple[Listener, Endpoint]) -> None:
    _, endpoint = served
    before = watch.open_descriptors()
    attack((endpoint.host, endpoint.port), seed=os.getpid(), count=500)
    watch.until(lambda: watch.open_descriptors() <= before)


@pytest.mark.slow
def test_gloo_offers_no_encryption(make_local: Make) -> None:
    """What the README says of it: a torch that can do better fails this test."""
    with pytest.raises(TrainingError, match="unsupported gloo device"):
        make_local(1, env={"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}).run(trainings.all_reduce)
