"""Several runs at the same time in one process: from threads, in Spark's pools, and on one machine's GPUs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import trainings
import watch
from sessions import MASTERS, Sessions

from distributor import Run, RunCancelledError, StartError, Status, TorchDistributor, TrainingError, runs
from distributor.schedulers.spark.status import stages_of


def number_or_error(number: int, folder: str) -> int:
    """Some fail; two say that they are there, and then wait to be cancelled."""
    if number >= 6:
        Path(folder, f"waits-{number}").touch()
        threading.Event().wait()
    if number % 3 == 2:
        raise ValueError(f"number {number}")
    return number


def pools_of(session: Any, run: Run) -> set[str]:
    """The pools in which Spark has scheduled a run's stages."""
    store = session.sparkContext._jsc.sc().statusStore()
    stages = stages_of(session, f"distributor-{run._job.job_id}")
    return {str(store.lastStageAttempt(stage.stageId()).schedulingPool()) for stage in stages}


@pytest.mark.spark
@pytest.mark.slow
def test_eight_runs_from_threads_have_their_own_values_and_errors(sessions: Sessions, tmp_path: Path) -> None:
    session = sessions.get(MASTERS[-1], **{"spark.scheduler.mode": "FAIR"})
    before = threading.active_count()
    ended: dict[int, Any] = {}
    pools: dict[int, set[str]] = {}

    def train(number: int) -> None:
        session.sparkContext.setLocalProperty("spark.scheduler.pool", f"pool-{number % 2}")
        session.sparkContext.setJobGroup(f"group-{number}", f"number {number}")
        distributor = TorchDistributor(2, False, False, name=f"number {number}", grace_period=1)
        run = distributor.submit(number_or_error, number, str(tmp_path))
        if number >= 6:
            watch.until(lambda: (tmp_path / f"waits-{number}").exists())
            run.cancel() if number == 7 else session.sparkContext.cancelJobGroup("group-6")
        try:
            ended[number] = run.results(watch.DEADLINE)
        except (TrainingError, RunCancelledError) as error:
            ended[number] = error
        pools[number] = pools_of(session, run)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(watch.DEADLINE)
    assert sorted(ended) == list(range(8))
    for number, value in ended.items():
        if number >= 6:
            assert isinstance(value, RunCancelledError), value
        elif number % 3 == 2:
            assert isinstance(value, TrainingError) and f"ValueError: number {number}" in str(value)
        else:
            assert value == [number] * 2
    assert pools == {number: {f"pool-{number % 2}"} for number in range(8)}
    assert runs().active == []
    watch.until(lambda: threading.active_count() <= before)
    slots = TorchDistributor(4, False, False)
    assert slots.submit(trainings.rank).results(watch.DEADLINE) == [0, 1, 2, 3]


def wait_with_gpus(folder: str, name: str) -> str:
    """Say which GPUs this rank sees, and wait until its run may end."""
    Path(folder, f"{name}-{os.environ['RANK']}").touch()
    watch.until(lambda: Path(folder, f"end-{name}").exists())
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.slow
@pytest.mark.usefixtures("fake_gpus")
def test_runs_on_one_machine_have_different_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    first, second, third = (
        TorchDistributor(2, local_mode=True).submit(wait_with_gpus, str(tmp_path), name) for name in ("a", "b", "c")
    )
    watch.until(lambda: len(os.listdir(tmp_path)) == 4)
    names = {path.name[0] for path in tmp_path.iterdir()}
    waiting = [run for run in (first, second, third) if run.status is Status.WAITING]
    assert len(names) == 2 and len(waiting) == 1
    watch.until(lambda: "waiting for GPUs of other runs" in waiting[0].snapshot().detail)
    for name in names:
        (tmp_path / f"end-{name}").touch()
    seen = [run.results(watch.DEADLINE)[0] for run in (first, second, third) if run not in waiting]
    assert sorted(",".join(seen).split(",")) == ["4", "5", "6", "7"]
    for name in "abc":
        (tmp_path / f"end-{name}").touch()
    assert waiting[0].results(watch.DEADLINE)[0] in ("4,5", "6,7")


@pytest.mark.usefixtures("fake_gpus")
def test_a_run_that_waits_for_gpus_can_be_cancelled_and_times_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    holder = TorchDistributor(2, local_mode=True).submit(wait_with_gpus, str(tmp_path), "a")
    watch.until(lambda: len(os.listdir(tmp_path)) == 2)
    cancelled = TorchDistributor(1, local_mode=True).submit(trainings.rank)
    watch.until(lambda: "waiting for GPUs" in cancelled.snapshot().detail)
    cancelled.cancel()
    with pytest.raises(RunCancelledError):
        cancelled.result(watch.DEADLINE)
    late = TorchDistributor(1, local_mode=True, start_timeout=1).submit(trainings.rank)
    with pytest.raises(StartError, match="waiting for GPUs of other runs"):
        late.result(watch.DEADLINE)
    (tmp_path / "end-a").touch()
    holder.result(watch.DEADLINE)
    assert TorchDistributor(2, local_mode=True).submit(trainings.rank).results(watch.DEADLINE) == [0, 1]
