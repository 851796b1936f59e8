"""A host on which two attempts of a run have failed gets no ranks any more, if others have room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trainings
import watch
from hosts import Hosts, require
from sessions import Sessions

from distributor import TorchDistributor
from distributor.run import supervisor

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]

NAMES = ("host-a", "host-b", "host-c")


@pytest.fixture
def hosts(sessions: Sessions) -> Iterator[Hosts]:
    require()
    sessions.stop()
    with Hosts(NAMES, cores=2, memory="1g", executor_memory="512m") as hosts:
        yield hosts


def wait(folder: str) -> int:
    """Each rank notes its pid, and waits; the number of the attempt."""
    from distributor import runtime

    attempt = runtime.attempt()
    runtime.report(step=attempt)
    Path(folder, f"{attempt}-{runtime.rank()}").write_text(str(os.getpid()))
    trainings.wait_for(str(Path(folder, "go")))
    return attempt


def placement(hosts: Hosts, folder: Path, attempt: int, ranks: int) -> dict[str, int]:
    """The hosts of an attempt's ranks, and their pids."""
    files = [folder / f"{attempt}-{rank}" for rank in range(ranks)]
    watch.until(lambda: all(file.exists() and file.read_text() for file in files), 2 * watch.DEADLINE)
    pids = [int(file.read_text()) for file in files]
    return {name: pid for name in NAMES for pid in pids if pid in hosts.processes(name)}


def kill_agent(pid: int) -> None:
    """Kills the agent of a rank: the first of its ancestors that is one."""
    process = next(parent for parent in psutil.Process(pid).parents() if watch.part(parent) == "agent")
    process.kill()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_host_that_failed_twice_is_avoided(
    hosts: Hosts, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All failures are blamed on one of three hosts. Two ranks leave it out, although Spark does not; three cannot."""
    hosts.session()
    bad = NAMES[0]
    monkeypatch.setattr(supervisor, "_blamed", lambda ended: f"{hosts.addresses[bad]}:{4000 + ended.number}")
    distributor = TorchDistributor(ranks, False, False, max_processes_per_node=1, max_restarts=5, grace_period=1.0)
    run = distributor.submit(wait, str(tmp_path))
    for attempt in range(5):
        placed = placement(hosts, tmp_path, attempt, ranks)
        assert len(placed) == ranks
        assert attempt < 2 or (bad in placed) == (ranks == 3)
        if attempt < 4:
            kill_agent(max(placed.values()))
    (tmp_path / "go").touch()
    assert run.result(watch.DEADLINE) == 4
