"""Copies of states on other hosts, each of which has shared memory of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import checkpointed
import pytest
import watch
from hosts import Hosts, require
from sessions import Sessions

from distributor import Checkpoints, Run, TorchDistributor

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]

NAMES = ("host-a", "host-b", "host-c")
STEPS = 40


@pytest.fixture
def hosts(sessions: Sessions) -> Iterator[Hosts]:
    require()
    sessions.stop()
    with Hosts(NAMES, cores=1, memory="1g", executor_memory="512m", shm=dict.fromkeys(NAMES, "64m")) as hosts:
        yield hosts


def host_of(hosts: Hosts, run: Run, rank: int) -> str:
    """The host of a rank, which has reported its pid."""
    pid = next(int(row.values["pid"]) for row in run.metrics if row.rank == rank)
    return next(name for name in NAMES if pid in hosts.processes(name))


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "split"),
    [pytest.param(0, False, id="rank 0, DDP"), pytest.param(1, True, id="rank 1, FSDP2", marks=pytest.mark.long)],
)
def test_a_lost_host_costs_at_most_one_step(hosts: Hosts, rank: int, split: bool, tmp_path: Path) -> None:
    """The place takes nothing, and the host that is left out at first has nothing: copies come over the network."""
    local = TorchDistributor(2, True, False, checkpoints=tmp_path / "undisturbed")
    _, undisturbed, _ = local.run(checkpointed.train_digits, STEPS, split=split)
    hosts.session()
    kept = Checkpoints(str(tmp_path / "runs"), memory=True, replicate=True)
    distributor = TorchDistributor(
        2, False, False, checkpoints=kept, max_restarts=1, grace_period=1.0, heartbeat_timeout=5.0
    )
    run = distributor.submit(checkpointed.train_digits, STEPS, None, split, down=True, pause=0.2)
    watch.until(lambda: bool(run.metrics) and (run.metrics[-1].step or 0) >= 6)
    lost = host_of(hosts, run, rank)
    for pid in hosts.processes(lost):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    begun, weights, seen = run.result(3 * watch.DEADLINE)
    last = run.attempts[0].step
    assert last is not None and begun is not None and begun >= last - 1
    assert weights == undisturbed
    assert seen == STEPS * 16
    assert checkpointed.committed(tmp_path / "runs") == []
    hosts.stop_session()
    for name in NAMES:
        if name != lost:
            watch.until(lambda name=name: not list(hosts.memory(name).glob(f"*{run.id}*")))  # type: ignore[misc]
