"""Runs whose number of ranks is a range: they take the slots that there are, and go on with fewer or more."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trainings
import victims
import watch
from sessions import Make

from distributor import ConfigurationError, Distributor, Run, RunCancelledError, StartError, Status
from distributor.machine import processes
from distributor.run import handle
from distributor.run.margins import Margins

FOR_EVER = 1_000_000


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for free slots every 0.3 s instead of every minute."""
    monkeypatch.setattr(handle, "Margins", partial(Margins, widen=0.3))


def train(steps: int) -> tuple[int, int]:
    """Counts steps together with the other ranks; how many there were, and the last step."""
    import torch
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    state = {"step": 0}
    runtime.load_checkpoint(state)
    step = state["step"]
    for step in range(step + 1, steps + 1):
        dist.all_reduce(torch.ones(1))
        state["step"] = step
        runtime.report(step=step, width=dist.get_world_size())
        if runtime.should_stop(step):
            runtime.save_checkpoint(state, step, wait=True)
            break
        time.sleep(0.005)
    return dist.get_world_size(), step


def widths(run: Run) -> list[int]:
    """The width of each attempt that has reported, in order."""
    by_attempt = {row.attempt: int(row.values["width"]) for row in run.metrics}
    return [by_attempt[attempt] for attempt in sorted(by_attempt)]


@contextmanager
def slots_held(number: int, folder: Path) -> Iterator[None]:
    """Another run that holds some of the slots."""
    other = Distributor(number, False, False).submit(trainings.wait_for, str(folder / "go"))
    watch.until(lambda: other.status is Status.RUNNING)
    try:
        yield
    finally:
        (folder / "go").touch()
        other.result(watch.DEADLINE)


def test_on_this_machine_a_range_takes_its_upper_number(make_local: Make) -> None:
    run = make_local((2, 3)).submit(trainings.all_reduce)
    assert run.results(watch.DEADLINE) == [6.0] * 3
    assert run.num_processes == 3


def test_on_this_machine_a_range_is_limited_by_cpus(make_local: Make) -> None:
    run = make_local((1, 2), cpus_per_process=processes.cpu_count()).submit(trainings.all_reduce)
    assert run.results(watch.DEADLINE) == [1.0]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((4, 2), r"num_processes=\(4, 2\) must have the lower number first"),
        ((0, 2), "each number of num_processes must be a positive integer, not 0"),
        ((1, 2, 3), r"num_processes must be a number or a pair such as \(4, 16\), not \(1, 2, 3\)"),
        ("4", "num_processes must be a positive integer, not '4'"),
    ],
)
def test_refuses_ranges_that_are_none(given: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Distributor(given, True, False)


def test_ranks_beyond_the_smallest_number_may_be_shown(make_local: Make) -> None:
    assert make_local((1, 2), logs=[1]).run(trainings.all_reduce) == 3.0


@pytest.mark.usefixtures("_impatient")
@pytest.mark.long
def test_a_run_takes_what_is_free_and_widens(one_jvm: Any, tmp_path: Path) -> None:
    with slots_held(2, tmp_path):
        run = Distributor((1, 4), False, False, checkpoints=tmp_path).submit(train, FOR_EVER)
        watch.until(lambda: widths(run) == [2])
        assert run.num_processes == 2
    watch.until(lambda: widths(run)[-1] == 4)  # Spark frees one slot after the other: 3 ranks may come before
    assert run.num_processes == 4
    run.stop()
    results = run.results(watch.DEADLINE)
    assert len(results) == 4 and results[0][0] == 4 and len({*results}) == 1
    narrow = run.attempts[0]
    assert narrow.reason is not None
    told = r"there are slots for [34] ranks instead of 2, so all ranks have stopped at step "
    assert re.match(told, narrow.reason)
    assert f"The last checkpoint is of step {narrow.step}, in " in narrow.reason


@pytest.mark.usefixtures("_impatient")
@pytest.mark.long
def test_a_run_goes_on_with_what_is_left(two_executors: Any, tmp_path: Path) -> None:
    run = Distributor((2, 4), False, False, checkpoints=tmp_path, max_restarts=1).submit(train, FOR_EVER)
    watch.until(lambda: widths(run) == [4])
    victims.executor_of(run).kill()
    watch.until(lambda: len(widths(run)) > 1 and widths(run)[-1] == 4, 2 * watch.DEADLINE)  # Spark starts another one
    run.stop()
    assert {width for width, _ in run.results(watch.DEADLINE)} == {4}
    assert len(run.results()) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("_impatient")
def test_slots_that_the_limit_per_node_rules_out_are_no_room(two_executors: Any, tmp_path: Path) -> None:
    run = Distributor((1, 4), False, False, checkpoints=tmp_path, max_processes_per_node=1).submit(train, FOR_EVER)
    watch.until(lambda: widths(run) == [2])
    assert not run.wait(1.5)
    assert widths(run) == [2]
    run.stop()
    assert len(run.results(watch.DEADLINE)) == 2


@pytest.mark.long
def test_too_few_slots_are_waited_for(one_jvm: Any, tmp_path: Path) -> None:
    distributor = Distributor((3, 4), False, False, start_timeout=3)
    with slots_held(2, tmp_path):
        with pytest.raises(StartError, match="did not start within start_timeout=3 s: it was waiting for 3 task slots"):
            distributor.run(trainings.all_reduce)
        run = distributor.submit(trainings.all_reduce)
        watch.until(lambda: "waiting for 3 task slots" in run.snapshot().detail)
        run.cancel()
        with pytest.raises(RunCancelledError):
            run.result(watch.DEADLINE)


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.long
def test_widths_that_a_launch_path_cannot_have_are_passed_over() -> None:
    from distributor.launch import DeepSpeed

    launch = DeepSpeed({"train_batch_size": 8, "gradient_accumulation_steps": 1})
    assert Distributor((1, 3), True, False, launch=launch).run(trainings.all_reduce) == 3.0
    with pytest.raises(ConfigurationError, match="train_batch_size 8 is not a multiple of"):
        Distributor((3, 4), True, False, launch=launch)
