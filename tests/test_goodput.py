"""Where the time of a real run went."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import trainings
import watch
from sessions import Make

from distributor import StallError
from distributor.metrics.goodput import Goodput

STEP = 0.05


def lose_steps(steps: int) -> None:
    """Saves the fifth step, and is killed after the tenth."""
    from distributor import runtime

    state = {"step": 0}
    runtime.load_checkpoint(state)
    for step in range(state["step"] + 1, steps + 1):
        time.sleep(STEP)
        state["step"] = step
        runtime.report(step=step)
        if step == 5:
            runtime.save_checkpoint(state, step, wait=True)
        if step == 10 and runtime.attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long_on_executors
@pytest.mark.slow
def test_lost_steps_are_redone(make: Make, tmp_path: Path) -> None:
    run = make(1, checkpoints=tmp_path, max_restarts=1).submit(lose_steps, 15)
    assert run.wait(watch.DEADLINE)
    first, last = (attempt.goodput for attempt in run.attempts)
    whole = run.goodput
    assert whole == first + last
    assert whole.total == pytest.approx(run.snapshot().seconds, abs=1.0)
    assert first.redoing == 0.0 and first.training >= 8 * STEP and first.saving > 0.0
    assert last.redoing >= 4 * STEP and last.training >= 4 * STEP and last.loading > 0.0
    assert last.waiting == 0.0, "its nodes were there"


def test_a_run_without_steps_trains_from_the_start(make_local: Make) -> None:
    run = make_local(1).submit(time.sleep, 0.5)
    watch.until(lambda: run.goodput.training > 0.0)
    run.result(watch.DEADLINE)
    assert run.goodput == run.attempts[0].goodput
    assert run.goodput != Goodput()


def report_and_wait(go: str) -> None:
    from distributor import runtime

    runtime.report(step=1)
    trainings.wait_for(go)


def test_a_clock_that_is_set_back_takes_no_training_away(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_local(1).submit(report_and_wait, str(tmp_path / "go"))
    watch.until(lambda: run.progress is not None)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    watch.until(lambda: run.goodput.training > 0.0)
    (tmp_path / "go").touch()
    run.result(watch.DEADLINE)


def stall() -> None:
    """Reports a step, and then does nothing."""
    from distributor import runtime

    runtime.report(step=1)
    while True:  # the request for its stack wakes it
        signal.pause()


def test_a_stall_that_ends_the_run_is_no_training(make_local: Make) -> None:
    run = make_local(1, stall_timeout=2).submit(stall)
    with pytest.raises(StallError):
        run.result(watch.DEADLINE)
    assert run.goodput.stalled == pytest.approx(2.0)
    assert run.goodput == run.attempts[0].goodput
