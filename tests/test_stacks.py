"""What each rank is doing: stacks of a run, and stalls, which end it."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
import trainings
import watch
from sessions import Make

from distributor import StallError, Status


def stand(rendezvous: str) -> None:
    """Ranks 0 and 1 wait in an all-reduce for rank 2, which waits for a file."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    threading.Thread(target=background, args=(rendezvous,), daemon=True).start()
    if trainings.rank() == 2:
        wait_for_data(rendezvous)
    dist.all_reduce(torch.ones(1))


def background(path: str) -> None:
    wait_for_data(path)


def wait_for_data(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.1)


@pytest.mark.long_on_executors
def test_dump_stacks_shows_what_each_rank_is_doing(make: Make, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = make(3).submit(stand, str(go))
    assert run.dump_stacks() == {}  # nobody runs yet
    watch.until(lambda: run.status is Status.RUNNING)

    def summary() -> str:
        return str(run.dump_stacks()).partition("\n")[0]

    watch.until(
        lambda: re.search(r"ranks 0-1 in all_reduce at test_stacks\.py:\d+; rank 2 in wait_for_data", summary())
    )
    stacks = run.dump_stacks()
    assert sorted(stacks) == [0, 1, 2]
    assert all("in stand" in text for text in stacks.values())
    assert all("in background" in text for text in stacks.values())
    alone = run.dump_stacks(all_threads=False)
    assert all("in stand" in text and "in background" not in text for text in alone.values())
    go.touch()
    assert run.results(timeout=watch.DEADLINE) == [None] * 3  # asking did no harm
    assert run.dump_stacks() == {}


@pytest.mark.long_on_executors
def test_a_stall_ends_the_run_and_says_where_ranks_stand(make: Make, tmp_path: Path) -> None:
    run = make(3, stall_timeout=2, grace_period=1).submit(stand, str(tmp_path / "never"))
    with pytest.raises(StallError, match="no rank wrote anything or used CPU time for stall_timeout=2 s") as caught:
        run.result(timeout=2 * watch.DEADLINE)
    assert re.search(r"ranks 0-1 in all_reduce at test_stacks\.py:\d+; rank 2 in wait_for_data", str(caught.value))
    assert sorted(caught.value.stacks) == [0, 1, 2]
    assert run.status is Status.FAILED
    watch.gone(run.id)


def test_a_rank_that_computes_has_not_stalled(make_local: Make) -> None:
    def work() -> int:
        end = time.monotonic() + 4
        count = 0
        while time.monotonic() < end:
            count += 1
        return min(count, 1)

    assert make_local(1, stall_timeout=1).run(work) == 1


def test_a_rank_that_prints_has_not_stalled(make_local: Make) -> None:
    def speak() -> int:
        for step in range(10):
            print(step)
            time.sleep(0.5)
        return 1

    assert make_local(1, stall_timeout=3).run(speak) == 1


def leave_a_thread(path: str) -> str:
    threading.Thread(target=background, args=(path,), name="prefetch").start()
    return "returned"


def test_a_thread_that_outlives_the_function_is_named(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_local(1).submit(leave_a_thread, str(tmp_path / "go"))
    watch.until(lambda: "its thread 'prefetch' has not, and the run waits for it" in caplog.text)
    assert "in wait_for_data" in caplog.text
    watch.until(lambda: "a thread is still in wait_for_data at test_stacks.py" in str(run.dump_stacks()))
    (tmp_path / "go").touch()
    assert run.results(watch.DEADLINE) == ["returned"]
