"""Ranks that exchange bytes over a store, and what they are told when the others do something else."""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from distributor.checkpoint import exchange as module
from distributor.checkpoint.exchange import Exchange, connect, connect_group
from distributor.errors import ConfigurationError
from distributor.values.checkpoints import Checkpoints, to_environ
from distributor.values.environment import NODE_ID

torch = pytest.importorskip("torch")


@pytest.fixture
def store() -> Any:
    """A store that counts what it holds."""
    return torch.distributed.HashStore()


@pytest.fixture
def ranks(store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Any]]:
    """Runs a function of an exchange in several ranks at once, and returns their futures."""
    monkeypatch.setattr(module, "_LOOK", 0.05)
    with ThreadPoolExecutor(4) as pool:

        def run(*functions: Callable[[Exchange], Any]) -> list[Future[Any]]:
            made = [Exchange(store, rank, len(functions)) for rank in range(len(functions))]
            return [pool.submit(function, each) for function, each in zip(functions, made, strict=True)]

        yield run  # type: ignore[misc]


def answers(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(60) for future in futures]


def test_values_reach_rank_0_and_come_back(ranks: Any, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that take several pieces; and nothing is left in the store."""
    monkeypatch.setattr(module, "_PIECE", 16)
    before = store.num_keys()

    def call(exchange: Exchange) -> bytes:
        told = exchange.gather("1", bytes(range(200)) + bytes([exchange.rank]), "save(step=1)")
        return exchange.share("1", [each[-1:] * 3 for each in told], "save(step=1)")

    assert answers(ranks(call, call, call)) == [b"\0" * 3, b"\1" * 3, b"\2" * 3]
    assert store.num_keys() == before


def test_one_value_reaches_all(ranks: Any) -> None:
    assert answers(ranks(*[lambda each: each.share("1", [b"x"], "save")] * 3)) == [b"x"] * 3


def test_one_value_for_all_is_packed_once(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Mock(wraps=zlib.compress)
    monkeypatch.setattr(module, "zlib", Mock(compress=pack))
    Exchange(store, 0, 1000).share("1", [b"x"], "save")
    assert pack.call_count == 1


def test_different_calls_are_an_error_on_all_ranks(ranks: Any) -> None:
    def call(what: str) -> Callable[[Exchange], Any]:
        def make(exchange: Exchange) -> Any:
            exchange.gather("1", b"", what)
            return exchange.share("1", [b""], what)

        return make

    for future in ranks(call("save(step=1)"), call("save(step=1)"), call("save(step=2)")):
        with pytest.raises(ConfigurationError, match=r"rank 0 calls save\(step=1\), but rank 2 calls save\(step=2\)"):
            future.result(60)


def test_a_rank_that_has_ended_is_waited_for_by_nobody(ranks: Any) -> None:
    import os

    first, second = ranks(lambda each: each.gather("1", b"", "save(step=1)"), lambda each: each._end(os.getpid()))
    with pytest.raises(
        ConfigurationError, match=r"every rank must call save\(step=1\), but rank 1 has ended without calling it"
    ):
        first.result(60)
    second.result(60)


def test_a_wait_that_takes_long_is_told_and_given_up(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TELL_AFTER", 0.1)
    monkeypatch.setattr(module, "GIVE_UP_AFTER", 0.3)
    first, _ = ranks(lambda each: each.gather("1", b"", "save(step=1)"), lambda each: None)
    with pytest.raises(
        ConfigurationError, match=r"every rank must call save\(step=1\), but rank 1 did not call it within \d+ s"
    ):
        first.result(60)
    assert "save(step=1) waits for rank 1: every rank must call it" in caplog.text


def test_a_rank_that_has_begun_is_waited_for_while_it_lives(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GIVE_UP_AFTER", 0.1)
    begun = threading.Event()

    def late(exchange: Exchange) -> bytes:
        assert begun.wait(60)
        exchange.gather("1", b"late", "save")
        return exchange.share("1", [], "save", patient=True)

    def first(exchange: Exchange) -> bytes:
        threading.Timer(0.5, begun.set).start()
        return exchange.share("1", exchange.gather("1", b"", "save", patient=True)[1:], "save")

    assert answers(ranks(first, late)) == [b"late", b"late"]


def test_a_patient_wait_that_takes_long_is_told_and_not_given_up(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank, which has begun, sends its value only once the warning has been logged."""
    told, warned = list[str](), threading.Event()

    def warn(text: str, *values: object) -> None:
        told.append(text % values)
        warned.set()

    def late(exchange: Exchange) -> bytes:
        assert warned.wait(60)
        exchange.gather("1/1", b"late", "save")
        return exchange.share("1/1", [], "save", patient=True)

    def first(exchange: Exchange) -> bytes:
        return exchange.share("1/1", exchange.gather("1/1", b"", "save", patient=True)[1:], "save")

    monkeypatch.setattr(module, "TELL_PATIENTLY_AFTER", 0.0)
    monkeypatch.setattr(module, "GIVE_UP_AFTER", 0.0)
    monkeypatch.setattr(module._log, "warning", warn)
    assert answers(ranks(first, late)) == [b"late", b"late"]
    assert told[0] == (
        "save waits for rank 1: it may still be writing or reading, or waiting for another rank, so there is no time "
        "limit"
    )


@pytest.mark.parametrize("failing", range(3))
def test_a_rank_that_has_failed_in_a_call_is_waited_for_by_nobody(failing: int, ranks: Any) -> None:
    """It does not end, and takes part in the next call."""
    told = threading.Barrier(3)

    def call(exchange: Exchange) -> bytes:
        if exchange.rank == failing:
            exchange.fail("1", f"save: rank {failing} failed")
        else:
            with pytest.raises(RuntimeError, match=f"^save: rank {failing} failed$") as raised:
                exchange.gather("1/1", b"", "save", patient=True)
                exchange.share("1/1", [b""], "save", patient=True)
            assert raised.type is RuntimeError  # and no error about a wrong call
        told.wait(60)
        exchange.gather("2/1", b"", "save", patient=True)
        return exchange.share("2/1", [b"x"], "save", patient=True)

    assert answers(ranks(call, call, call)) == [b"x"] * 3


@pytest.mark.parametrize(
    ("code", "why"),
    [("1 +", "SyntaxError: invalid syntax"), ("raise ValueError('boom\\nand more')", "ValueError: boom")],
)
def test_the_reason_of_a_rank_that_fails_is_its_error(ranks: Any, code: str, why: str) -> None:
    """And neither the code of a syntax error nor a note."""

    def fail(exchange: Exchange) -> None:
        with exchange.taking_part("1", "load"):
            try:
                exec(code)
            except Exception as error:
                error.add_note("see the manual")
                raise

    one, other = ranks(lambda each: each.gather("1/1", b"", "load"), fail)
    with pytest.raises((ValueError, SyntaxError)):
        other.result(60)
    with pytest.raises(RuntimeError) as raised:
        one.result(60)
    assert str(raised.value) == f"load: rank 1 failed in the call ({why}); the exception raised there says why"


@pytest.mark.parametrize("failing", range(2))
def test_what_a_rank_has_sent_before_it_fails_counts(failing: int, ranks: Any) -> None:
    def call(exchange: Exchange) -> list[bytes]:
        own = bytes([exchange.rank])
        if exchange.rank > 0:
            exchange.gather("1/1", own, "save")
        else:
            exchange.share("1/2", [own], "save")
        if exchange.rank == failing:
            exchange.fail("1", "save: it failed")
        sent.wait(60)
        return exchange.gather("1/1", own, "save") if exchange.rank == 0 else [exchange.share("1/2", [], "save")]

    sent = threading.Barrier(2)
    assert answers(ranks(call, call)) == [[b"\0", b"\1"], [b"\0"]]


def test_a_wait_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch's store writes two lines whenever a wait of its own times out."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    late = threading.Timer(1.5, Exchange(client, 1, 2).gather, ("1", b"late", "save"))
    late.start()
    assert Exchange(store, 0, 2).gather("1", b"", "save", patient=True)[1] == b"late"
    late.join()
    assert capfd.readouterr().err == ""


def test_a_failed_answer_to_rank_0_reaches_all_ranks(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has ended; rank 2, which has sent its part, waits for nobody."""
    import os

    def call(exchange: Exchange) -> bytes:
        exchange.gather("1", b"", "save")
        return exchange.share("1", [b""], "save")

    zero, one, two = ranks(call, lambda each: each._end(os.getpid()), call)
    one.result(60)
    for future in (zero, two):
        with pytest.raises(ConfigurationError, match="every rank must call save, but rank 1 has ended"):
            future.result(60)


def test_the_first_to_ask_decides(ranks: Any) -> None:
    chosen = answers(ranks(*[lambda each: each.agree("latest", f"rank {each.rank}")] * 3))
    assert len(set(chosen)) == 1
    alone = Exchange(None, 0, 1)
    assert (alone.agreed("latest"), alone.agree("latest", "x")) == (None, "x")


def test_one_rank_needs_no_store() -> None:
    alone = connect(0, 1, "0", "save")
    assert connect_group(0, 1, "ab", "save")[1] == "ab"
    assert alone.gather("1", b"x", "save") == [b"x"]
    assert alone.share("1", [b"y"], "save") == b"y"
    with pytest.raises(ConfigurationError, match="why"):
        alone.refuse("1", "why")


def test_several_ranks_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="all 2 ranks take part in save, but they have no store of torch's"):
        connect(0, 2, "0", "save")
    with pytest.raises(
        ConfigurationError,
        match=r"save needs a process group, since all 2 ranks take part in it: call torch.*init_process_group",
    ):
        connect_group(0, 2, "ab", "save")


CHECK = """
from distributor.checkpoint import start
start._VISIBLE, start._STOPPED = 0.3, 0.0
start.check_place(local_rank=0)
print("begins")
"""


@pytest.mark.slow
def test_a_node_that_sees_another_folder_is_named(tmp_path: Path) -> None:
    """Two processes, each with a folder of its own under the name that both have been given."""
    import os

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(60))

    def check(rank: int, folder: Path) -> subprocess.Popen[str]:
        told = {
            **os.environ,
            **{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)},
            **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": folder.name, NODE_ID: "x"},
            **to_environ(Checkpoints(str(folder)), str(folder), {0: "host-a"}),
        }
        return subprocess.Popen(
            [sys.executable, "-c", CHECK], env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    one, other = check(0, tmp_path / "ab"), check(1, tmp_path / "cd")
    begun, error = other.communicate(timeout=90)
    assert f"checkpoints '{tmp_path}/cd' is not the same folder on this node as on host-a: a file" in error
    begun_too, error = one.communicate(timeout=90)
    assert "has failed on another node" in error
    assert begun == begun_too == ""
    assert list((tmp_path / "ab").iterdir()) == []
