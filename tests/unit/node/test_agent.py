"""What an agent says of a launcher that could not start its ranks, and what it does if its owner ends early."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import make_job

import distributor
from distributor.channel import control as control_line, frames
from distributor.channel.rank_slots import RankSlots
from distributor.machine import folders, limits, processes
from distributor.machine.limits import Limits
from distributor.node import agent, ranks, staging, state_keeper
from distributor.stopping.node import NodeStop
from distributor.stopping.vote_file import VoteFile
from distributor.values import codec, layout, messages
from distributor.values.placement import NodeFacts
from distributor.values.plan import AgentOrder


def started_without(folder: Path, *options: str) -> tuple[str, str] | None:
    """Why no rank was started, after a launcher that was started with these options of Python has failed."""
    root = str(Path(distributor.__file__).parents[1])
    package = shutil.make_archive(str(folder / "package"), "zip", root, "distributor")  # as executors have it
    import_it = f"import sys; sys.path.insert(0, {package!r}); import distributor.node.launcher"
    with layout.launcher_log(folder).open("wb") as log:
        done = subprocess.run([sys.executable, *options, "-c", import_it], stderr=log, cwd=folder, check=False)
    launcher: Any = SimpleNamespace(returncode=done.returncode)
    order: Any = SimpleNamespace(host="host-b", folder=str(folder))
    unheard = NodeStop(VoteFile(folder / "board"), 0, 0, print, print)
    return ranks.Ranks(RankSlots(1), unheard).start_error(launcher, order, stopping=False)


def test_a_python_without_torch_is_a_sentence(tmp_path: Path) -> None:
    assert started_without(tmp_path, "-S") == (
        "StartError",
        f"torch cannot be imported on host-b by {sys.executable} (ModuleNotFoundError: No module named 'torch'): "
        "install it there, or choose another Python before the session starts (the environment variable "
        "PYSPARK_PYTHON, or spark.pyspark.python)",
    )


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import ctypes; ctypes.CDLL('libno.so')", "OSError: libno.so: cannot open shared object file"),
        ("raise ImportError('libcudart.so.12')", "ImportError: libcudart.so.12"),
    ],
)
def test_a_torch_that_is_broken_says_why(tmp_path: Path, source: str, why: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    found = started_without(tmp_path, "-S")
    assert found is not None
    assert f"({why}" in found[1]
    assert "\n" not in found[1]


def test_a_launcher_that_fails_otherwise_shows_all_that_it_said(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os; print('out of', 'luck', file=__import__('sys').stderr)\nos._exit(3)"
    )
    found = started_without(tmp_path, "-S")
    assert found == ("StartError", "the launcher on host-b ended with code 3, before any rank was up\nout of luck")


def test_a_launcher_that_lacks_address_space_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "here", lambda: Limits(None, None, 1 << 29, False))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os._exit(1)")
    found = started_without(tmp_path, "-S")
    assert found is not None
    assert "before any rank was up: the node limits the address space of each process to 512 MiB" in found[1]
    assert "spark.executor.pyspark.memory" in found[1]


class Link:
    """Notes when the driver can be told something, and that the owner is gone."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def open(self, _: object) -> None:
        self.notes.append("open")

    def orphan(self, *, lives: bool) -> None:
        self.notes.append(f"orphan, lives={lives}")

    def warn(self, *_: object) -> None:
        pass

    carry = send = tell = warn


def test_an_owner_that_ends_before_the_attempt_is_prepared_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = [codec.plain(NodeFacts(0, "a", "host-a", "127.0.0.1", 4000, cpus=1))]
    order = AgentOrder(pickle.dumps(make_job(attempt=1)), "a", [], facts, str(tmp_path), "/", [], None, on_driver=True)
    control, owner = socket.socketpair()
    signals: list[int] = []
    launcher: Any = SimpleNamespace(pid=1 << 30, returncode=None, send_signal=signals.append, kill=print)

    async def play() -> None:
        made: Any = agent._Agent(order, {"control": control}, launcher, [])
        made._link = link = Link()
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(processes, "kill_earlier", lambda *_: loop.call_soon_threadsafe(made._on_owner_gone))
        _, attempt = await made._open()
        assert attempt._stopping is not None
        assert link.notes[-2:] == ["open", "orphan, lives=False"]
        attempt._ranks.slots.close()

    with control, owner:
        asyncio.run(play())
    assert signals == [layout.STOP_SIGNAL]


def test_a_node_that_cannot_be_prepared_tells_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other nodes wait for it."""
    facts = [codec.plain(NodeFacts(0, "a", "host-a", "127.0.0.1", 4000, cpus=1))]
    order = AgentOrder(pickle.dumps(make_job()), "a", [], facts, str(tmp_path), "/", [], None, on_driver=True)
    control, owner = socket.socketpair()
    ours, theirs = socket.socketpair()

    def unpack(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def play() -> list[messages.Message]:
        made: Any = agent._Agent(order, {"control": control, "channel": theirs}, SimpleNamespace(), [])  # type: ignore[arg-type]
        monkeypatch.setattr(staging, "unpack", unpack)
        monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
        running = asyncio.ensure_future(made.run(os.getpid()))
        reader, writer = await asyncio.open_connection(sock=ours)
        told = [await asyncio.wait_for(frames.read(reader), 10) for _ in range(3)]
        writer.write(frames.pack(messages.Farewell((), True)))
        result = await asyncio.to_thread(control_line.receive, owner)
        owner.close()
        await running
        writer.close()
        report = pickle.loads(messages.decode(result).report)
        assert report.node_rank == -1 and "is full" in report.error[1]
        return told

    with control, theirs:
        hello, failed, bye = asyncio.run(play())
    assert isinstance(hello, messages.Hello) and hello.digest
    assert failed == messages.Failed(attempt=0)
    assert bye == messages.Bye()


def test_states_in_memory_do_not_count_as_stale_before_the_keeper_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another agent on the host may remove stale folders at any moment."""
    folder, states = folders.make("3f2a"), tmp_path / "states"
    states.mkdir()
    folders.note_elsewhere(folder, [str(states)], to_the_end=True)
    kept = []

    class Keeper:
        def end(self, *, keep: bool) -> None:
            folders.remove_stale()
            kept.append(states.exists())

    async def soon(value: object) -> Any:
        return value

    node = SimpleNamespace(address="127.0.0.1")
    order = AgentOrder(pickle.dumps(make_job()), "a", [], [], folder, "/", [], None, on_driver=True)
    control, owner = socket.socketpair()

    async def play() -> None:
        made: Any = agent._Agent(order, {"control": control}, SimpleNamespace(), [])  # type: ignore[arg-type]
        made._open = lambda: soon((SimpleNamespace(memory=None, node=node), None))
        made._train = lambda *_: soon((None, {}, True))
        made._hand_over = lambda *_: soon(owner.close())
        monkeypatch.setattr(state_keeper, "begin", lambda *_, **__: soon(Keeper()))
        monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
        await made.run(os.getpid())

    with control, owner:
        asyncio.run(play())
    assert kept == [True]
    assert not Path(folder).exists()
