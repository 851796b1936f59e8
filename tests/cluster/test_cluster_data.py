"""Data on a path that three hosts share, one of which is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import watch
from hosts import Hosts, require
from pyspark.sql import functions
from sessions import Sessions
from torch import distributed, nn

from distributor import Data, Distributor, runtime

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]

NAMES = ("host-a", "host-b", "host-c")
OPTIONS: dict[str, Any] = {"use_gpu": False, "max_restarts": 1, "grace_period": 1.0, "heartbeat_timeout": 5.0}
STEPS = 20


@pytest.fixture
def hosts(sessions: Sessions) -> Iterator[Hosts]:
    require()
    sessions.stop()
    with Hosts(NAMES, cores=1, memory="1g", executor_memory="512m") as hosts:
        yield hosts


def train(folder: str, waits: bool) -> list[float]:
    """Write down each rank's rows of each step. If it ``waits``, the first attempt never ends."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    loader = runtime.dataset("train").loader(global_batch_size=96, shuffle=True, seed=3)
    state = {"model": model, "optimizer": optimizer, "data": loader}
    step = runtime.load_checkpoint(state) or 0
    for batch in loader:
        step += 1
        Path(folder, f"{step}-{runtime.attempt()}-{runtime.rank()}").write_text(repr(batch["y"].tolist()))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"].float()).backward()
        optimizer.step()
        runtime.save_checkpoint(state, step, wait=True)
        runtime.report(step=step, pid=os.getpid())
        if step == STEPS // 2 and runtime.attempt() == 0 and waits:
            threading.Event().wait()
    return [float(value) for value in model.module.weight.detach().flatten()]


def global_batches(folder: Path) -> list[list[int]]:
    """The rows of each step in the last attempt that made it."""
    found: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for path in folder.glob("*-*-*"):
        step, attempt, rank = map(int, path.name.split("-"))
        found[step][attempt][rank] = eval(path.read_text())
    last = [found[step][max(found[step])] for step in sorted(found)]
    return [[row for rank in sorted(ranks) for row in ranks[rank]] for ranks in last]


@pytest.mark.long
@pytest.mark.parametrize("width", [pytest.param(2, marks=pytest.mark.long), (1, 3)])
def test_a_lost_host_changes_no_row(hosts: Hosts, width: Any, tmp_path: Path) -> None:
    session = hosts.session()
    number = functions.col("id")
    frame = session.range(2_000, numPartitions=3).select(
        number.alias("y"), number.cast("float").alias("x1"), (-number).cast("float").alias("x2")
    )
    data = {"train": Data(frame, pack={"x": ["x1", "x2"]}, label="y", lanes=12)}
    run = Distributor(
        width, local_mode=False, data=data, checkpoints=str(tmp_path / "saved"), max_processes_per_node=1, **OPTIONS
    ).submit(train, str(tmp_path), True)
    watch.until(lambda: bool(run.metrics) and run.metrics[-1].step == STEPS // 2)
    pid = next(int(row.values["pid"]) for row in run.metrics if row.rank == run.num_processes - 1)
    lost = next(name for name in NAMES if pid in hosts.processes(name))
    for process in hosts.processes(lost):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    weights = run.result(3 * watch.DEADLINE)
    assert run.num_processes == 2
    local = tmp_path / "local"
    local.mkdir()
    undisturbed = Distributor(2, local_mode=True, data=data, checkpoints=str(local / "saved"), use_gpu=False)
    expected = undisturbed.run(train, str(local), False)
    assert global_batches(tmp_path) == global_batches(local)
    assert len(global_batches(local)) == STEPS
    if width == 2:
        assert weights == expected
