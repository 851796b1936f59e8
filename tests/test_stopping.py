"""All ranks stop at the same step: because the user wants it, or because one of them is about to be ended."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import victims
import watch
from sessions import MASTERS, Make, Sessions

from distributor import (
    ConfigurationError,
    NodeLostError,
    PreemptionError,
    Run,
    RunCancelledError,
    Status,
    StopError,
    TorchDistributor,
)

FOR_EVER = 1_000_000

#: Orders in which the processes of a node get SIGTERM.
SEEDS = [0, 1]


def train(steps: int, asks: str = "all", stride: int = 1) -> tuple[int, int | None]:
    """Counts steps, with a collective in each. Where it began, and the step at which it was told to stop, if it was.

    ``asks``: which ranks ask whether to stop. If only rank 0 does, it tells the others. ``stride``: in which steps.
    """
    import torch
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    state = {"step": 0}
    runtime.load_checkpoint(state)
    begun = state["step"]
    for step in range(begun + 1, steps + 1):
        stops = torch.zeros(1)
        if asks == "all" or (asks == "rank 0" and dist.get_rank() == 0):
            stops += step % stride == 0 and runtime.should_stop(step)
        dist.all_reduce(stops, op=dist.ReduceOp.MAX)
        state["step"] = step
        runtime.report(step=step, pid=os.getpid())
        if stops:
            runtime.save_checkpoint(state, step, wait=True)
            return begun, step
        time.sleep(0.002)
    return begun, None


def count(apart: bool) -> None:
    """Counts steps, and saves nothing. If the ranks are apart, those of rank 1 are odd, those of rank 0 are even."""
    from distributor import runtime

    for step in range(runtime.rank(), FOR_EVER, 2) if apart else range(FOR_EVER):
        runtime.report(step=step, pid=os.getpid())
        if runtime.should_stop(step):
            return
        time.sleep(0.002)


def await_steps(run: Run, attempt: int = 0) -> None:
    """Waits until ranks of an attempt train."""
    watch.until(lambda: any(row.attempt == attempt and row.step for row in run.metrics))


def preempt(run: Run, attempt: int = 0) -> None:
    """Sends SIGTERM to a rank of an attempt."""
    await_steps(run, attempt)
    row = next(row for row in run.metrics if row.attempt == attempt)
    os.kill(int(row.values["pid"]), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("asks", ["all", pytest.param("rank 0", marks=pytest.mark.long)])
@pytest.mark.long_on_executors
def test_a_run_that_is_asked_to_stop_succeeds(make: Make, asks: str, tmp_path: Path) -> None:
    run = make(4, checkpoints=tmp_path).submit(train, FOR_EVER, asks)
    await_steps(run)
    run.stop()
    (result,) = {*run.results(watch.DEADLINE)}
    assert run.status is Status.SUCCEEDED
    assert result[1] is not None
    again = make(4, checkpoints=tmp_path).run(train, result[1] + 3, asks)
    assert again == (result[1], None)


@pytest.mark.long
def test_a_run_may_be_asked_to_stop_before_it_has_begun(make_local: Make, tmp_path: Path) -> None:
    run = make_local(2, checkpoints=tmp_path).submit(train, FOR_EVER)
    run.stop(timeout=watch.DEADLINE)
    assert run.results(watch.DEADLINE) == [(0, 1), (0, 1)]


@pytest.mark.slow
def test_a_training_that_was_stopped_has_not_finished(make_local: Make, tmp_path: Path) -> None:
    """The same call goes on with it."""
    named = make_local(2, checkpoints=tmp_path, name="digits")
    run = named.submit(train, FOR_EVER)
    await_steps(run)
    run.stop()
    (_, stopped) = run.result(watch.DEADLINE)
    run = named.submit(train, FOR_EVER)
    run.stop()
    assert run.result(watch.DEADLINE) == (stopped, stopped + 1)


@pytest.mark.long
def test_preemptions_without_progress_come_to_an_end(make_local: Make) -> None:
    run = make_local(1, max_restarts=1).submit(preempt_itself)
    with pytest.raises(PreemptionError, match="The last three attempts reached no later step than those before"):
        run.result(watch.DEADLINE)
    steps = [attempt.step for attempt in run.attempts]
    assert len(steps) >= 4 and all(step is not None and step > 5 for step in steps)


def preempt_itself() -> None:
    """Gets SIGTERM in the same step of each attempt, and saves nothing."""
    from distributor import runtime

    for step in range(FOR_EVER):
        if runtime.should_stop(step):
            return
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5 if step >= 5 else 0.0)


@pytest.mark.long
def test_preemptions_below_lost_steps_make_progress(make_local: Make, tmp_path: Path) -> None:
    run = make_local(1, checkpoints=tmp_path, max_restarts=1).submit(regain_lost_steps)
    assert run.result(watch.DEADLINE) == run.attempts[3].step
    steps = [attempt.step for attempt in run.attempts[:4]]
    assert steps[0] == FOR_EVER
    assert steps[1:] == sorted(set(steps[1:]))


def regain_lost_steps() -> int | None:
    """Is killed long after its first checkpoint. Each later attempt gets SIGTERM in its first step, and saves."""
    from distributor import runtime

    state = {"step": 0}
    runtime.load_checkpoint(state)
    if runtime.attempt() == 0:
        runtime.save_checkpoint({"step": 1}, 1, wait=True)
        runtime.report(step=FOR_EVER)
        os.kill(os.getpid(), signal.SIGKILL)
    if runtime.attempt() == 4:
        return state["step"]
    for step in range(state["step"] + 1, FOR_EVER):
        stops = runtime.should_stop(step)
        if stops:
            runtime.save_checkpoint({"step": step}, step, wait=True)
            return None
        if step == state["step"] + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
    return None


def test_should_stop_may_be_asked_every_tenth_step(make_local: Make, tmp_path: Path) -> None:
    run = make_local(2, checkpoints=tmp_path).submit(train, FOR_EVER, "all", 10)
    await_steps(run)
    run.stop()
    (result,) = {*run.results(watch.DEADLINE)}
    assert result[1] is not None and result[1] % 10 == 0


@pytest.mark.slow
def test_a_function_that_never_asks_is_cancelled(make_local: Make, tmp_path: Path) -> None:
    run = make_local(2, checkpoints=tmp_path, grace_period=1).submit(train, FOR_EVER, "none")
    await_steps(run)
    run.stop(timeout=0.1)
    text = rf"run {run.id} was cancelled: its ranks had not ended 0\.1 s after run\.stop\(\)"
    with pytest.raises(RunCancelledError, match=text):
        run.result(watch.DEADLINE)
    watch.gone(run.id)


def test_refuses_a_stop_timeout_that_is_no_number(make_local: Make) -> None:
    run = make_local(1).submit(print)
    for timeout in (-1, "soon", float("nan")):
        with pytest.raises(ConfigurationError, match="timeout must be a number of seconds from 0.0 to a year, not "):
            run.stop(timeout)  # type: ignore[arg-type]
    run.result(watch.DEADLINE)


@pytest.mark.slow
def test_a_cancel_does_not_wait_for_a_step(make_local: Make, tmp_path: Path) -> None:
    """SIGTERM would only ask the ranks, one of which waits in a collective."""
    run = make_local(2, checkpoints=tmp_path, grace_period=1000).submit(train, FOR_EVER)
    await_steps(run)
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(watch.DEADLINE)
    watch.gone(run.id)


@pytest.mark.slow
@pytest.mark.long_on_executors
def test_a_preempted_run_ends_with_the_checkpoint(make: Make, tmp_path: Path) -> None:
    run = make(4, checkpoints=tmp_path).submit(train, FOR_EVER)
    preempt(run)
    text = (
        r"the run was preempted: rank \d on \S+ got SIGTERM, and all ranks have stopped at step (\d+)\. "
        rf"The last checkpoint is of step \1, in {tmp_path}"
    )
    with pytest.raises(PreemptionError, match=text):
        run.result(watch.DEADLINE)
    assert run.status is Status.FAILED


def test_without_a_checkpoint_a_preempted_run_says_so(make_local: Make) -> None:
    run = make_local(2).submit(count, False)
    preempt(run)
    with pytest.raises(PreemptionError, match=r"have stopped at step \d+\. This run has committed no checkpoint"):
        run.result(watch.DEADLINE)


@pytest.mark.long
def test_a_preempted_run_goes_on_and_does_not_count_it(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make(4, checkpoints=tmp_path, max_restarts=1).submit(train, FOR_EVER)
    for attempt in range(3):
        preempt(run, attempt)
    await_steps(run, 3)
    run.stop()
    (result,) = {*run.results(watch.DEADLINE)}
    steps = [attempt.step for attempt in run.attempts]
    assert result == (steps[2], steps[3])
    assert [attempt.reason is None for attempt in run.attempts] == [False, False, False, True]
    assert caplog.text.count("starting again in a new job: the run was preempted: rank ") == 3


def load(start_method: str = "fork") -> tuple[int, int | None]:
    """As ``train``, with batches that other processes load."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from distributor import runtime

    dist.init_process_group("gloo")
    state = {"step": 0}
    runtime.load_checkpoint(state)
    begun = state["step"]
    loader = DataLoader(range(FOR_EVER), num_workers=2, multiprocessing_context=start_method)  # type: ignore[arg-type]
    for step, _ in enumerate(loader, begun + 1):
        dist.all_reduce(torch.ones(1))
        state["step"] = step
        runtime.report(step=step)
        if runtime.should_stop(step):
            runtime.save_checkpoint(state, step, wait=True)
            return begun, step
    return begun, None


def await_all(run: Run) -> None:
    """Waits until all ranks train, with all their workers."""
    watch.until(lambda: {row.rank for row in run.metrics if (row.step or 0) > 10} == set(range(run.num_processes)))


def terminate(processes: list[psutil.Process], seed: int) -> None:
    """Sends SIGTERM to all processes of a node, in any order."""
    for process in random.Random(seed).sample(processes, len(processes)):
        with suppress(psutil.NoSuchProcess):
            process.terminate()


def goes_on(run: Run) -> None:
    """Asserts that the second attempt begins with the step at which the first has stopped."""
    await_steps(run, 1)
    run.stop()
    ((begun, _),) = {*run.results(watch.DEADLINE)}
    assert begun == run.attempts[0].step and begun > 0


@pytest.mark.long_on_executors
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.long
def test_a_node_all_of_whose_processes_get_sigterm_saves_and_stops(make: Make, seed: int, tmp_path: Path) -> None:
    run = make(4, checkpoints=tmp_path, max_restarts=1, grace_period=watch.DEADLINE).submit(load)
    await_all(run)
    terminate(victims.node_of(run, with_executor=False), seed)
    goes_on(run)
    reason = run.attempts[0].reason or ""
    assert re.match(r"the run was preempted: (the node|rank \d) on .* got SIGTERM, and all ranks have stopped", reason)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_save_and_stop_although_their_executor_ends(two_executors: Any, seed: int, tmp_path: Path) -> None:
    run = TorchDistributor(4, False, False, checkpoints=tmp_path, max_restarts=1).submit(load)
    await_all(run)
    terminate(victims.node_of(run, with_executor=True), seed)
    goes_on(run)
    watch.gone(run.id)


@pytest.mark.long
def test_workers_of_a_data_loader_outlive_sigterm_however_they_start(make_local: Make, tmp_path: Path) -> None:
    run = make_local(1, checkpoints=tmp_path, max_restarts=1, grace_period=watch.DEADLINE).submit(load, "spawn")
    await_all(run)
    terminate(victims.node_of(run, with_executor=False), 0)
    goes_on(run)


@pytest.mark.slow
def test_ranks_save_although_their_driver_ends_with_them(tmp_path: Path) -> None:
    """In local mode, the driver is a process of the node."""
    code = (
        "from distributor import TorchDistributor\nimport test_stopping\n"
        f"run = TorchDistributor(2, True, False, checkpoints={str(tmp_path / 'saved')!r}).submit(test_stopping.load)\n"
        "test_stopping.await_all(run)\nprint('trains', flush=True)\nrun.result()\n"
    )
    for seed in range(2):
        driver = programs.start(tmp_path, code, stdout=subprocess.PIPE)
        assert driver.stdout is not None and driver.stdout.readline() == "trains\n"
        node = [psutil.Process(driver.pid), *watch.below(driver.pid)]
        terminate(node, seed)
        driver.wait(watch.DEADLINE)
        watch.until(lambda: not any(process.is_running() for process in node[1:]))
        assert len([*tmp_path.glob("saved/step-*/manifest.json")]) == seed + 1


def test_ranks_that_never_ask_are_ended_with_their_node(make_local: Make) -> None:
    run = make_local(2).submit(time.sleep, 600)
    watch.until(lambda: run.status is Status.RUNNING)
    victims.part(run, "agent").terminate()
    with pytest.raises(NodeLostError, match=r"ranks 0-1 were stopped .*: the node on \S+ got SIGTERM"):
        run.result(watch.DEADLINE)
    watch.gone(run.id)


@pytest.mark.slow
def test_an_executor_that_spark_decommissions_makes_all_stop(sessions: Sessions, tmp_path: Path) -> None:
    """The run goes on where Spark still starts tasks."""
    session = sessions.get(MASTERS[-1], **{"spark.decommission.enabled": "true"})
    run = TorchDistributor((2, 4), False, False, checkpoints=tmp_path, max_restarts=1).submit(train, FOR_EVER)
    await_steps(run)
    assert run.num_processes == 4
    jvm, scala = session.sparkContext._jvm, session.sparkContext._jsc.sc()
    info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("a spot instance", jvm.scala.Option.empty())
    assert scala.schedulerBackend().decommissionExecutor("0", info, False, False)
    await_steps(run, 1)
    assert run.num_processes in (2, 4)  # Spark may have started another executor by now
    run.stop()
    run.result(watch.DEADLINE)
    reason = run.attempts[0].reason
    assert reason is not None and re.match(
        r"the run was preempted: Spark is about to end the executor on \S+, and", reason
    )


@pytest.mark.parametrize("wished", [True, False])
def test_ranks_that_stop_at_different_steps_fail(make_local: Make, wished: bool) -> None:
    run = make_local(2, max_restarts=1).submit(count, True)
    await_steps(run)
    if wished:
        run.stop()
    else:
        preempt(run)
        preempt(run, 1)
    text = r"rank \d was told to stop at step \d+, and rank \d at step \d+: call should_stop\(\) with the same steps"
    with pytest.raises(StopError, match=text):
        run.result(watch.DEADLINE)
    assert len(run.attempts) == (1 if wished else 2)
    watch.gone(run.id)


@pytest.mark.long
def test_without_a_channel_nothing_stops(
    one_jvm: Any, unreachable: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM then ends a rank as ever."""
    run = TorchDistributor(2, False, False, grace_period=1).submit(ask, str(tmp_path))
    watch.until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
    run.stop()
    watch.until(lambda: "its ranks cannot be asked to stop, since no node reaches the driver" in caplog.text)
    os.kill(int((tmp_path / "0").read_text()), signal.SIGTERM)
    with pytest.raises(RuntimeError, match="rank 0 on .* failed: killed by SIGTERM"):
        run.result(watch.DEADLINE)


def ask(folder: str) -> None:
    """Asks for ever, and says so once."""
    from distributor import runtime

    for step in range(FOR_EVER):
        assert not runtime.should_stop(step)
        if step == 1:
            new = Path(folder, f"{runtime.rank()}.new")
            new.write_text(str(os.getpid()))
            new.rename(Path(folder, str(runtime.rank())))
        time.sleep(0.01)
