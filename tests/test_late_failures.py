"""Training has ended, and then something dies that passes on what it returns: the run has succeeded all the same."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import watch
from proxy import Proxy
from sessions import Sessions

from distributor import NodeLostError, Run, TorchDistributor

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SMALL, LARGE = 1000, 24 << 20

WARNING = "Spark failed, but all results have reached the driver. Spark's reason: "


def train(size: int, stop: tuple[str, ...], folder: str) -> bytes:
    """Trains, and before it returns stops its Python worker or executor, so that Spark brings nothing back."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    agent = psutil.Process().parents()[1]
    worker = psutil.Process(int(agent.cmdline()[5]))
    (executor,) = [parent for parent in worker.parents() if "CoarseGrained" in " ".join(parent.cmdline())][:1] or [
        worker
    ]
    dist.barrier()
    if stop[rank] != "":
        victim = {"worker": worker, "executor": executor}[stop[rank]]
        victim.send_signal(signal.SIGSTOP)
        Path(folder, f"{rank}.pid").write_text(str(victim.pid))
    dist.barrier()
    dist.destroy_process_group()
    return random.Random(rank).randbytes(size)


def submit(size: int, folder: Path, *stop: str, **options: Any) -> tuple[Run[Any], list[psutil.Process]]:
    """Starts a run of two ranks on two nodes, and returns it when they have returned, with what is stopped."""
    distributor = TorchDistributor(2, False, False, max_processes_per_node=1, **options)
    run = distributor.submit(train, size, stop, str(folder))
    return run, [process_in(folder / f"{rank}.pid") for rank, name in enumerate(stop) if name]


def process_in(file: Path) -> psutil.Process:
    """The process whose pid comes to be in a file."""
    return psutil.Process(int(watch.until(lambda: file.exists() and file.read_text())))


def kill(stopped: list[psutil.Process]) -> None:
    for process in stopped:
        with suppress(psutil.NoSuchProcess):  # Spark has ended it already
            process.kill()


def has_succeeded(run: Run[Any], size: int) -> bool:
    values = run.results(timeout=watch.DEADLINE)
    watch.gone(run.id)
    return values == [random.Random(rank).randbytes(size) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize(
    "stop",
    [
        ("", "executor"),
        pytest.param(("worker", ""), marks=pytest.mark.long),
        pytest.param(("executor", "executor"), marks=pytest.mark.long),
        ("worker", "worker"),
    ],
)
def test_values_survive_the_death_of_what_passes_them_on(
    sessions: Sessions, stop: tuple[str, str], size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sessions.get("local-cluster[2,2,1024]")
    run, stopped = submit(size, tmp_path, *stop)
    watch.until(lambda: run.snapshot().ranks_up == 0)
    kill(stopped)
    assert has_succeeded(run, size)
    assert WARNING in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("end", [pytest.param("cancelAllJobs", marks=pytest.mark.long), "stop"])
def test_values_that_have_arrived_outlive_sparks_job(sessions: Sessions, end: str, tmp_path: Path) -> None:
    spark = sessions.get("local-cluster[2,2,1024]")
    run, stopped = submit(SMALL, tmp_path, "worker", "worker")
    watch.until(lambda: run.snapshot().ranks_up == 0)
    getattr(spark.sparkContext, end)()
    kill(stopped)
    assert has_succeeded(run, SMALL)


@pytest.mark.long
def test_values_arrive_although_a_worker_dies_meanwhile(sessions: Sessions, wire: Proxy, tmp_path: Path) -> None:
    sessions.get("local-cluster[2,2,1024]")
    wire.stop_after(LARGE // 2, times=1, hang=True)
    run, stopped = submit(LARGE, tmp_path, "", "worker", heartbeat_timeout=5)
    watch.until(lambda: wire.stopped)
    (worker,) = stopped
    worker.kill()
    assert has_succeeded(run, LARGE)


@pytest.mark.long
def test_values_are_lost_with_their_agent(sessions: Sessions, wire: Proxy, tmp_path: Path) -> None:
    sessions.get("local-cluster[2,2,1024]")
    wire.stop_after(LARGE // 2, hang=True)
    run, (worker,) = submit(LARGE, tmp_path, "", "worker")
    watch.until(lambda: wire.stopped)
    (agent,) = watch.agents_of(worker.pid)
    agent.kill()
    worker.kill()
    with pytest.raises(NodeLostError):
        run.result(timeout=watch.DEADLINE)
    watch.until(lambda: not watch.processes(run.id))  # the next run removes the folder of the two
