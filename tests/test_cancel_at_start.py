"""Runs that end while Spark is just starting their tasks: executors stay, and runs that have not begun start again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import trainings
import watch
from sessions import Sessions

from distributor import RunCancelledError, TorchDistributor
from distributor.schedulers.spark import classic, scheduler

pytestmark = pytest.mark.spark


def executors() -> set[int]:
    """Pids of the executors of this process."""
    pids = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                pids.add(process.pid)
    return pids


@pytest.fixture
def held_up(sessions: Sessions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Tasks that leave a file each and wait, before they do anything, until what is returned is called."""
    sessions.get("local-cluster[2,2,1024]")
    make_task, go, folder = scheduler._make_task, tmp_path / "go", str(tmp_path)

    def waiting(shipment: Any) -> Any:
        inner = make_task(shipment)

        def task() -> Iterator[bytes]:
            import os
            import time
            import uuid

            open(os.path.join(folder, f"here-{uuid.uuid4()}"), "w").close()
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.01)
            yield from inner()

        return task

    monkeypatch.setattr(scheduler, "_make_task", waiting)
    yield go.touch
    go.touch()


def come(folder: Path, count: int) -> None:
    """Wait until so many tasks wait."""
    watch.until(lambda: sum(name.startswith("here-") for name in os.listdir(folder)) >= count)


@pytest.mark.slow
def test_a_cancel_before_tasks_meet_leaves_executors_alone(
    held_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They meet in Spark's ``allGather``, as they do where the driver cannot be reached."""
    deliver = classic.ClassicSession.deliver
    monkeypatch.setattr(classic.ClassicSession, "deliver", lambda *args: replace(deliver(*args), exchange=False))
    before = executors()
    run = TorchDistributor(4, False, False, grace_period=1).submit(trainings.rank)
    come(tmp_path, 4)
    run.cancel()
    run.wait(0.5)  # Spark is asked to kill the tasks in this time, if it is asked at once
    held_up()
    with pytest.raises(RunCancelledError):
        run.result(timeout=watch.DEADLINE)
    end = time.monotonic() + 3.0
    while time.monotonic() < end:  # an executor that ends takes a second or two
        assert executors() == before
        time.sleep(0.1)
    assert TorchDistributor(4, False, False).run(trainings.all_reduce) == 10.0
    assert executors() == before


@pytest.mark.long
def test_a_run_that_loses_an_executor_before_it_has_begun_starts_again(
    held_up: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = TorchDistributor(4, False, False, grace_period=1).submit(trainings.all_reduce)
    come(tmp_path, 4)
    psutil.Process(executors().pop()).kill()
    watch.until(lambda: "starting run" in caplog.text or run.wait(0))
    held_up()
    assert run.result(timeout=2 * watch.DEADLINE) == 10.0
