"""A second attempt of a run on the same nodes, inside the same Spark job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpointed
import psutil
import pytest
import trainings
import watch
from sessions import LOCAL, Make, Sessions

from distributor import Checkpoints, Run, RunCancelledError, Status, TrainingError
from distributor.api.scheduling import choose_scheduler
from distributor.schedulers.local import LocalScheduler

Submit = Callable[..., Run]


@pytest.fixture
def submit(make: Make, local: bool, mode: str, request: pytest.FixtureRequest) -> Submit:
    """Starts a run on two nodes whose ranks may be started again."""

    def submitted(function: Any, *args: Any, **options: Any) -> Run:
        session = None if local else request.getfixturevalue("sessions").get(mode)
        scheduler = LocalScheduler(2) if local else choose_scheduler(session, use_gpu=False)
        options = {"max_restarts": 1, "restart_on": "any", "grace_period": 1.0, **options}
        job = make(4, **options).plan(function, *args)
        scheduler.check(job)
        return Run(job, scheduler).start()

    return submitted


def fail_once(folder: str, how: str, attempts: int = 1) -> tuple[int, float]:
    """Rank 1 fails in the first attempts, in its way; then a collective succeeds."""
    import torch
    import torch.distributed as dist

    from distributor import runtime

    attempt = runtime.attempt()
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), Path(folder)
    (path / f"{attempt}-{rank}").write_text(f"{os.getpid()} {os.getppid()}")
    print(f"rank {rank} in attempt {attempt}", flush=True)
    runtime.report(step=10 - attempt, number=rank)
    dist.barrier()
    if attempt < attempts and rank == 1:
        if how == "raise":
            raise ValueError("not this time")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt < attempts:
        trainings.wait_for(str(path / "never"))
    total = torch.ones(1)
    dist.all_reduce(total)
    return attempt, float(total)


def pids(folder: Path, attempt: int) -> set[int]:
    """The pids of the ranks and launchers of an attempt."""
    return {int(pid) for file in folder.glob(f"{attempt}-*") for pid in file.read_text().split()}


@pytest.mark.parametrize(
    "how",
    [
        "kill",
        pytest.param("raise", marks=pytest.mark.long),
        pytest.param("exit", marks=pytest.mark.long),
    ],
)
def test_ranks_start_again_on_the_same_nodes(
    submit: Submit, mode: str, sessions: Sessions, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = submit(fail_once, str(tmp_path), how)
    assert run.results(watch.DEADLINE) == [(1, 4.0)] * 4
    assert run.status is Status.SUCCEEDED
    assert "restarting its ranks (restart 1 of at most 1): rank 1 failed: " in caplog.text
    reported = [(row.attempt, row.step, row.rank) for row in run.metrics]
    assert sorted(reported) == [(attempt, 10 - attempt, rank) for attempt in (0, 1) for rank in range(4)]
    assert run.progress is not None and run.progress.step == 9
    failed, last = run.attempts
    assert (failed.number, last.number, last.reason) == (0, 1, None)
    assert failed.reason is not None and failed.reason.startswith("rank 1 failed: ")
    assert failed.seconds > 0 and last.seconds > 0
    first, second = pids(tmp_path, 0), pids(tmp_path, 1)
    assert len(first) == len(second) == 6  # four ranks and two launchers
    assert not first & second
    assert not [pid for pid in first if psutil.pid_exists(pid)]
    watch.gone(run.id)
    if mode != LOCAL:
        tracker = sessions.get(mode).sparkContext._jsc.sc().statusTracker()
        assert len(tracker.getJobIdsForTag(f"distributor-{run.id}")) == 1


def import_dynamo(folder: str, variable: bool) -> tuple[bool, bool]:
    """Whether torch._dynamo was loaded in the second attempt, and what it has read from a variable."""
    import sys

    from distributor import runtime

    is_loaded, rank = "torch._dynamo" in sys.modules, runtime.rank()
    launcher = psutil.Process().parent()
    assert launcher is not None
    first = runtime.attempt() == 0  # later, it may have a child that is a zombie
    spares = [child for child in launcher.children() if child.cmdline()[4] == "spare"] if first else []
    size = sum(spare.memory_info().rss for spare in spares)
    if variable and rank % 2 == 1:
        os.environ["TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS"] = "1"
    import torch._dynamo

    if runtime.attempt() > 0:
        return is_loaded, torch._dynamo.config.capture_scalar_outputs
    Path(folder, f"imported-{rank}").touch()
    if rank % 2 == 1:  # one of each node
        watch.until(lambda: len(list(Path(folder).glob("imported-*"))) == 4)
        (spare,) = spares
        looks = spare.num_ctx_switches().voluntary
        watch.until(
            lambda: spare.num_ctx_switches().voluntary > looks + 2 or spare.memory_info().rss > size + (30 << 20)
        )
        Path(folder, f"looked-{rank}").touch()
    if rank == 1:
        watch.until(lambda: len(list(Path(folder).glob("looked-*"))) == 2)
        os.kill(os.getpid(), signal.SIGKILL)
    trainings.wait_for(str(Path(folder, "never")))
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("variable", [False, True])
def test_a_slow_import_is_repeated_before_the_next_attempt_unless_ranks_change_what_it_reads(
    submit: Submit, tmp_path: Path, variable: bool
) -> None:
    run = submit(import_dynamo, str(tmp_path), variable, restart_on="infrastructure")
    assert run.results(watch.DEADLINE) == [(not variable, variable and rank % 2 == 1) for rank in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("local_ranks", ["executor", pytest.param("host", marks=pytest.mark.long)])
def test_each_node_keeps_states_in_memory(submit: Submit, tmp_path: Path, local_ranks: str) -> None:
    """Whoever else is on the host: each node has what its ranks need."""
    kept = Checkpoints(str(tmp_path), memory=True)
    run = submit(keep_in_memory, checkpoints=kept, local_ranks=local_ranks, restart_on="infrastructure")
    assert run.results(watch.DEADLINE) == [(7, rank) for rank in range(4)]


def keep_in_memory() -> tuple[int | None, int]:
    """Saves where nothing can be committed; rank 3 is killed. The step and the value of its own that a rank finds."""
    import torch
    import torch.distributed as dist

    from distributor import runtime

    checkpointed.take_nothing()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    state: dict[str, Any] = {"model": model, "own": -1}
    if runtime.attempt() > 0:
        return runtime.load_checkpoint(state), state["own"]
    state["own"] = runtime.rank()
    runtime.save_checkpoint(state, 7)
    dist.barrier()
    if runtime.rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    trainings.wait_for(str(Path("never")))
    raise AssertionError


def test_a_failure_of_the_last_attempt_is_the_error(submit: Submit, tmp_path: Path) -> None:
    run = submit(fail_once, str(tmp_path), "raise", 3, max_restarts=2)
    with pytest.raises(TrainingError, match="rank 1 on .* failed: ValueError: not this time"):
        run.result(watch.DEADLINE)
    assert len(pids(tmp_path, 2)) == 6
    assert not pids(tmp_path, 3)
    watch.gone(run.id)


def save_slowly(folder: str) -> None:
    """Rank 1 fails; the others ignore SIGTERM and write, so that nobody kills them before the grace period ends."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank != 1:
        signal.signal(signal.SIGTERM, lambda *_: Path(folder, f"saving-{rank}").touch())
    with open(Path(folder, f"written-{rank}"), "a", buffering=1) as file:
        Path(folder, f"up-{rank}").touch()
        while rank != 1 or not Path(folder, "fail").exists():
            file.write("writes\n")
            time.sleep(0.02)
        raise ValueError("no")


@pytest.mark.long
def test_a_run_that_is_cancelled_while_it_stops_does_not_start_again(submit: Submit, tmp_path: Path) -> None:
    run = submit(save_slowly, str(tmp_path), grace_period=5.0)
    watch.until(lambda: len(list(tmp_path.glob("up-*"))) == 4)
    (tmp_path / "fail").touch()
    watch.until(lambda: run.status is Status.STOPPING and list(tmp_path.glob("saving-*")))
    run.cancel()
    with pytest.raises(TrainingError, match="ValueError: no"):  # it keeps its first reason
        run.result(watch.DEADLINE)
    watch.gone(run.id)


@pytest.mark.long_on_executors
def test_a_second_attempt_can_be_cancelled(submit: Submit, tmp_path: Path) -> None:
    run = submit(wait_in_the_second, str(tmp_path))
    watch.until(lambda: (tmp_path / "second").exists())
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(watch.DEADLINE)
    watch.gone(run.id)


def wait_in_the_second(folder: str) -> None:
    from distributor import runtime

    if runtime.attempt() == 0:
        raise ValueError("no")
    Path(folder, "second").touch()
    trainings.wait_for(str(Path(folder, "never")))


def handle_sigterm(folder: str, how: str) -> int:
    """In the first attempt, rank 1 is killed; the others do not end at SIGTERM, as if they waited in a collective."""
    from distributor import runtime

    rank = runtime.rank()
    if runtime.attempt() > 0:
        return runtime.attempt()
    signal.signal(signal.SIGTERM, lambda *_: time.sleep(600))
    log = open(Path(folder, f"log-{rank}"), "w")  # stays open, as logs do
    log.write("begun\n")
    Path(folder, f"up-{rank}").touch()
    trainings.wait_for(str(Path(folder, "kill")))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "write" and rank == 2:
        with open(Path(folder, "large"), "wb") as file:
            for number in range(40):
                file.write(bytes([number]) * 1000)
                file.flush()
                end = time.monotonic() + 0.05
                while time.monotonic() < end:  # a signal handler that sleeps would end this
                    pass
    time.sleep(600)
    raise AssertionError


@pytest.mark.slow
@pytest.mark.long_on_executors
@pytest.mark.parametrize("how", ["wait", pytest.param("write", marks=pytest.mark.long_on_executors)])
def test_ranks_that_ignore_sigterm_do_not_delay_the_next_attempt(submit: Submit, tmp_path: Path, how: str) -> None:
    """A file that is being written is finished first, as far as the grace period lets it."""
    run = submit(handle_sigterm, str(tmp_path), how, grace_period=10 * watch.DEADLINE, restart_on="infrastructure")
    watch.until(lambda: len(list(tmp_path.glob("up-*"))) == 4)
    (tmp_path / "kill").touch()
    assert run.results(watch.DEADLINE) == [1] * 4
    if how == "write":
        assert (tmp_path / "large").stat().st_size == 40_000
    assert run.attempts[0].reason == "rank 1 failed: killed by SIGKILL"
    watch.gone(run.id)


@pytest.mark.long_on_executors
def test_ranks_that_stall_start_again(submit: Submit) -> None:
    run = submit(trainings.wait_at_first, stall_timeout=1.0, restart_on="infrastructure")
    assert run.results(watch.DEADLINE) == [1] * 4
    reason = run.attempts[0].reason
    assert reason is not None and reason.startswith("no rank wrote anything or used CPU time for stall_timeout=1 s")
    watch.gone(run.id)
