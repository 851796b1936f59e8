"""A run that has lost a node, or cannot start ranks again on its nodes, goes on in a new job."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import accompanied
import pytest
import trainings
import victims
import watch
from sessions import LOCAL, Make, Sessions

from distributor import (
    CompanionError,
    NodeLostError,
    Run,
    RunCancelledError,
    StartError,
    Status,
    TorchDistributor,
    TrainingError,
)
from distributor.channel.server import ChannelServer
from distributor.values.environment import NODE_ID, node_id


def wait_to_be_killed(folder: str, attempts: int = 1) -> tuple[int, float]:
    """Meets the others, and waits in the first attempts until something is killed; the last one returns."""
    import torch
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    attempt, rank = runtime.attempt(), dist.get_rank()
    print(f"rank {rank} in attempt {attempt}", flush=True)
    runtime.report(step=attempt, pid=os.getpid())
    total = torch.ones(1)
    dist.all_reduce(total)
    Path(folder, f"{attempt}-{rank}").touch()
    if attempt < attempts:
        trainings.wait_for(str(Path(folder, "never")))
    return attempt, float(total)


def kill(run: Run, folder: Path, name: str, attempt: int = 0, ranks: int = 2, *, reports: bool = True) -> None:
    """Waits until all ranks of an attempt are there, and their reports if they make any, and kills a process."""
    watch.until(lambda: all((folder / f"{attempt}-{rank}").exists() for rank in range(ranks)))
    watch.until(lambda: not reports or sum(row.attempt == attempt for row in run.metrics) == ranks)
    victims.FINDS[name](run).kill()


@pytest.mark.parametrize(
    ("mode", "victim"),
    [
        (LOCAL, "agent"),
        pytest.param("local-cluster[2,2,1024]", "agent", marks=pytest.mark.spark),
        pytest.param("local-cluster[2,2,1024]", "worker", marks=[pytest.mark.spark, pytest.mark.slow]),
        pytest.param(
            "local-cluster[2,2,1024]", "executor", marks=[pytest.mark.spark, pytest.mark.slow, pytest.mark.ci]
        ),
        pytest.param("local[4]", "worker", marks=[pytest.mark.spark, pytest.mark.long]),
    ],
    indirect=["mode"],
)
def test_a_run_goes_on_after_a_node_is_lost(
    make: Make, mode: str, victim: str, sessions: Sessions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = 2 if mode == LOCAL else 4
    run = make(ranks, max_restarts=1, log_dir=tmp_path / "logs").submit(wait_to_be_killed, str(tmp_path))
    assert run.log_folder is not None
    logs = [run.log_folder / f"rank-{rank}.stdout" for rank in range(ranks)]
    watch.until(
        lambda: all(log.exists() and "waiting" in log.read_text() for log in logs)
    )  # a killed agent sends no more
    kill(run, tmp_path, victim, ranks=ranks)
    assert run.results(watch.DEADLINE) == [(1, float(ranks))] * ranks
    assert run.status is Status.SUCCEEDED
    assert "starting again in a new job (restart 1 of at most 1): " in caplog.text
    lost, last = run.attempts
    assert (lost.number, lost.step, last.number, last.step, last.reason) == (0, 0, 1, 1, None)
    assert lost.reason is not None and lost.reason.startswith("lost the node on ")
    assert lost.executor is not None and last.executor is None
    assert sorted((row.attempt, row.rank) for row in run.metrics) == [(a, r) for a in (0, 1) for r in range(ranks)]
    for rank, log in enumerate(logs):
        assert log.read_text() == f"rank {rank} in attempt 0\nwaiting\nrank {rank} in attempt 1\n"
    watch.gone(run.id)
    if mode != LOCAL:
        tracker = sessions.get(mode).sparkContext._jsc.sc().statusTracker()
        assert [len(tracker.getJobIdsForTag(f"distributor-{run.id}{end}")) for end in ("", "-1")] == [1, 1]


@pytest.mark.slow
def test_the_last_attempt_is_the_error_and_earlier_ones_are_listed(make_local: Make, tmp_path: Path) -> None:
    """An agent is lost, and then a rank of the new job is killed: both count."""
    run = make_local(2, max_restarts=2).submit(wait_to_be_killed, str(tmp_path), 3)
    kill(run, tmp_path, "agent")
    kill(run, tmp_path, "rank", 1)
    kill(run, tmp_path, "agent", 2)
    with pytest.raises(NodeLostError, match="^lost the node on ") as caught:
        run.result(watch.DEADLINE)
    lines = str(caught.value).partition("\n\nEarlier attempts:\n")[2].splitlines()
    assert [line.partition(",")[0] for line in lines] == ["  attempt 0", "  attempt 1"]
    assert "last step 0: lost the node on " in lines[0]
    assert "last step 1: rank 1 failed: killed by SIGKILL" in lines[1]
    assert [ended.number for ended in run.attempts] == [0, 1, 2]
    assert all(ended.executor is not None for ended in run.attempts)
    watch.gone(run.id)


def no_further(folder: str) -> None:
    """Reports a step; the second attempt a later one. Each attempt is killed."""
    from distributor import runtime

    Path(folder, str(runtime.attempt())).touch()
    runtime.report(step=min(runtime.attempt(), 1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_without_progress_is_not_restarted_for_ever(make_local: Make, tmp_path: Path) -> None:
    run = make_local(1, max_restarts=9).submit(no_further, str(tmp_path))
    with pytest.raises(TrainingError, match="killed by SIGKILL") as caught:
        run.result(watch.DEADLINE)
    assert "The last three attempts reached no later step" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "4"]


def test_a_run_that_is_cancelled_in_a_new_job(make_local: Make, tmp_path: Path) -> None:
    run = make_local(2, max_restarts=1).submit(wait_to_be_killed, str(tmp_path), 2)
    kill(run, tmp_path, "agent")
    watch.until(lambda: (tmp_path / "1-0").exists())
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(watch.DEADLINE)
    watch.gone(run.id)


def test_a_run_that_was_cancelled_before_its_node_was_lost(make_local: Make, tmp_path: Path) -> None:
    run = make_local(2, max_restarts=1, grace_period=60.0).submit(save_for_ever, str(tmp_path))
    watch.until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
    run.cancel()
    watch.until(lambda: len(list(tmp_path.glob("saving-*"))) == 2)
    victims.part(run, "agent").kill()
    with pytest.raises(RunCancelledError):
        run.result(watch.DEADLINE)
    assert len(run.attempts) == 1
    watch.gone(run.id)


def save_for_ever(folder: str) -> None:
    rank = os.environ["RANK"]
    signal.signal(signal.SIGTERM, lambda *_: Path(folder, f"saving-{rank}").touch())
    Path(folder, f"up-{rank}").touch()
    trainings.wait_for(str(Path(folder, "never")))


@pytest.mark.long
def test_without_a_channel_each_attempt_is_a_job(one_jvm: Any, unreachable: None) -> None:
    run = TorchDistributor(2, False, False, max_restarts=1).submit(kill_once)
    assert run.results(watch.DEADLINE) == [1, 1]
    assert run.attempts[0].reason is not None and "killed by SIGKILL" in run.attempts[0].reason
    tracker = one_jvm.sparkContext._jsc.sc().statusTracker()
    assert [len(tracker.getJobIdsForTag(f"distributor-{run.id}{end}")) for end in ("", "-1")] == [1, 1]
    watch.gone(run.id)


def kill_once() -> int:
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    if runtime.attempt() == 0 and runtime.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return runtime.attempt()


@pytest.mark.slow
def test_companions_start_again_in_a_new_job(make_local: Make, tmp_path: Path) -> None:
    """A launch path that cannot start ranks again on its nodes: a rank is killed, then a companion."""
    path = accompanied.Accompanied("serve", {"folder": str(tmp_path)}, nodes=(0,))
    run = make_local(2, launch=path, max_restarts=2).submit(wait_to_be_killed, str(tmp_path), 2)
    kill(run, tmp_path, "rank")
    watch.until(lambda: (tmp_path / "1-1").exists() and (tmp_path / "1-0").exists())
    victims.part(run, "companion").kill()
    assert run.results(watch.DEADLINE) == [(2, 2.0)] * 2
    reasons = [ended.reason for ended in run.attempts]
    assert reasons[0] is not None and "failed: killed by SIGKILL" in reasons[0]
    assert reasons[1] is not None and reasons[1].startswith("the companion helper on ")
    watch.gone(run.id)


@pytest.mark.slow
@pytest.mark.parametrize(("when", "attempts"), [("before", 1), ("later", 2)])
def test_a_companion_is_restarted_only_if_it_was_ready(
    make_local: Make, tmp_path: Path, when: str, attempts: int
) -> None:
    """If it cannot start in the first attempt, it is not tried again."""
    (tmp_path / "go").touch()
    path = accompanied.Accompanied("fail", {"when": when, "how": 3, "path": str(tmp_path / "go")}, nodes=(0,))
    run = make_local(1, launch=path, max_restarts=1).submit(trainings.wait_for, str(tmp_path / "never"))
    with pytest.raises(CompanionError, match="the companion helper on .* exited with code 3"):
        run.result(watch.DEADLINE)
    assert [ended.number for ended in run.attempts] == list(range(attempts))


@pytest.mark.slow
def test_files_of_the_lost_job_are_there_again(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new job finds what earlier nodes have brought to output_dir."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    run = make(2, max_restarts=1, output_dir=out).submit(write_then_wait, str(tmp_path))
    watch.until(lambda: (out / "written-0").exists() and (out / "written-1").exists())
    kill(run, tmp_path, "agent", reports=False)
    assert run.results(watch.DEADLINE) == [["written-0", "written-1"]] * 2
    watch.gone(run.id)


def write_then_wait(folder: str) -> list[str]:
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    rank = runtime.rank()
    if runtime.attempt() == 0:
        Path(f"written-{rank}").write_text(str(rank))
        Path(folder, f"0-{rank}").touch()
        trainings.wait_for(str(Path(folder, "never")))
    return sorted(path.name for path in Path().glob("written-*"))


@pytest.mark.parametrize("wrong", ["first", "later"])
def test_only_a_later_attempt_may_fail_to_start(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """The place of checkpoints cannot be used; or an agent cannot start when it is needed again."""
    from distributor.schedulers.local import LocalScheduler

    real, starts = LocalScheduler.run, []

    def failing(self: LocalScheduler, job: Any, server: ChannelServer) -> Any:
        starts.append(job.attempt)
        if job.attempt == (0 if wrong == "first" else 1):
            raise StartError("no process can be started")
        return real(self, job, server)

    monkeypatch.setattr(LocalScheduler, "run", failing)
    run = make_local(2, max_restarts=2).submit(wait_to_be_killed, str(tmp_path))
    if wrong == "first":
        with pytest.raises(StartError, match="^no process can be started$"):
            run.result(watch.DEADLINE)
        assert starts == [0]
        return
    kill(run, tmp_path, "agent")
    assert run.results(watch.DEADLINE) == [(2, 2.0)] * 2
    assert starts == [0, 1, 2]
    assert [ended.reason for ended in run.attempts][1:] == ["no process can be started", None]


def test_processes_left_by_earlier_jobs_are_killed(make_local: Make, tmp_path: Path) -> None:
    """A process of another node of the first job, which nobody else ends. Otherwise, it would hold its GPU."""
    run = make_local(2, max_restarts=1).submit(wait_to_be_killed, str(tmp_path))
    with subprocess.Popen(["/bin/sleep", "600"], env={NODE_ID: node_id(run.id, 7)}) as left:
        kill(run, tmp_path, "agent")
        assert run.results(watch.DEADLINE) == [(1, 2.0)] * 2
        assert left.wait(watch.DEADLINE) == -signal.SIGKILL
    watch.gone(run.id)
