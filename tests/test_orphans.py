"""Nothing outlives its owner: orphans that nothing marks, warm processes that nobody needs, zombies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import programs
import psutil
import pytest
import trainings
import watch
from sessions import Make
from watch import started_by

from distributor import NodeLostError
from distributor.machine import bootstrap


def leave_orphan(path: str) -> None:
    """Starts a process that no mark, session or output ties to its rank, and waits; its pid is left in a file."""
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    # A shell starts it and ends: what is left was never a child of the rank.
    shell = ["/bin/sh", "-c", f"sleep 600 & echo $! > {path}.new; mv {path}.new {path}"]
    subprocess.run(shell, start_new_session=True, env={"PATH": os.defpath}, check=True, cwd="/", **quiet)  # type: ignore[call-overload]
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize(("keep_warm", "victims"), [(600, "agent"), (600, "agent, warm"), (0, "agent"), (0, "guard")])
def test_an_agent_that_is_killed_leaves_no_orphan(
    make_local: Make, keep_warm: float, victims: str, tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    run = make_local(1, keep_warm=keep_warm, grace_period=1).submit(leave_orphan, str(path))
    orphan = psutil.Process(int(watch.until(lambda: path.exists() and path.read_text())))
    (agent,) = [process for process in watch.processes(run.id) if watch.is_agent(process)]
    parent = agent.parent()
    assert parent is not None
    assert bootstrap.is_part(parent.pid, "warm" if keep_warm else "guard")
    if victims == "guard":
        parent.kill()
        assert not run.wait(0.5)  # the agent goes on, and leaves nothing behind
        run.cancel()
        assert run.wait(watch.DEADLINE)
    else:
        for process in [agent, *([parent] if "warm" in victims else [])]:
            process.kill()
        with pytest.raises(NodeLostError):
            run.result(timeout=watch.DEADLINE)
    watch.gone(run.id)
    watch.until(lambda: not orphan.is_running())


@pytest.mark.spark
@pytest.mark.slow
def test_an_agent_that_is_killed_on_an_executor_leaves_no_orphan(make: Make, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    run = make(1, grace_period=1).submit(leave_orphan, str(path))
    orphan = psutil.Process(int(watch.until(lambda: path.exists() and path.read_text())))
    next(process for process in watch.processes(run.id) if watch.is_agent(process)).kill()
    with pytest.raises(NodeLostError):
        run.result(timeout=watch.DEADLINE)
    watch.until(lambda: not orphan.is_running())
    assert make(2).run(trainings.all_reduce) == 3.0


IMPORTING = """
    from distributor import TorchDistributor
    TorchDistributor(1, True, False, preload=["slow_module"], progress=False).run(print)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
@pytest.mark.long
def test_a_warm_process_that_imports_ends_with_its_driver(number: signal.Signals, tmp_path: Path) -> None:
    importing = tmp_path / "importing"
    (tmp_path / "slow_module.py").write_text(f"open({str(importing)!r}, 'w')\nimport time\ntime.sleep(600)\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"PYTHONPATH": str(tmp_path), "TMPDIR": str(temporary)}
    with programs.start(tmp_path, IMPORTING, env=env, stderr=subprocess.DEVNULL) as driver:
        watch.until(importing.exists)
        (warm,) = watch.warm_processes(driver.pid)
        guard, folder = warm.parent(), watch.folder_of(warm.pid)
        assert guard is not None
        driver.send_signal(number)
    watch.until(lambda: not warm.is_running())
    watch.until(lambda: not guard.is_running() and not folder.exists())
    assert not list(temporary.iterdir())


@pytest.mark.long
def test_warm_processes_whose_folders_were_deleted_end(make_local: Make) -> None:
    """No run finds them any more, so that they would be there beside the three that one may have."""
    there = []
    for index in range(3):
        there.append(psutil.Process(make_local(1, env={"DELETED": str(index)}).run(started_by)))
        shutil.rmtree(watch.folder_of(there[-1].pid))
    watch.until(lambda: not any(process.is_running() for process in there))


@pytest.mark.long
def test_a_warm_process_whose_folder_was_deleted_serves_its_run(make_local: Make, tmp_path: Path) -> None:
    warm = psutil.Process(make_local(1, env={"DELETED": "used"}).run(started_by))
    run = make_local(1, env={"DELETED": "used"}).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: run.snapshot().ranks_up == 1)
    shutil.rmtree(watch.folder_of(warm.pid))
    assert not run.wait(2.0)
    (tmp_path / "go").touch()
    assert run.result(timeout=watch.DEADLINE) == 0
    watch.until(lambda: not warm.is_running())


def abandon(count: int) -> int:
    """Starts processes whose parents end before them; waits, and returns how many stay as zombies of the agent."""
    for _ in range(count):
        subprocess.run(["/bin/sh", "-c", "sleep 0.1 &"], check=True)
    agent = psutil.Process().parents()[1]

    def left() -> int:
        return len(agent.children()) - 1  # the launcher

    end = time.monotonic() + 60.0
    while left() and time.monotonic() < end:
        time.sleep(0.05)
    return left()


def test_no_orphan_stays_a_zombie(make_local: Make) -> None:
    assert make_local(1).run(abandon, 118) == 0


def code_of_child() -> int:
    """The exit code of a rank's own child, as the rank sees it."""
    return subprocess.run([sys.executable, "-c", "raise SystemExit(7)"]).returncode


IGNORING = """
    import sys
    from distributor import TorchDistributor, TrainingError
    from test_orphans import code_of_child

    def fail():
        raise SystemExit(3)

    distributor = TorchDistributor(2, True, False, keep_warm=float(sys.argv[1]), progress=False)
    assert distributor.run(code_of_child) == 7
    try:
        distributor.run(fail)
    except TrainingError as error:
        assert "exited with code 3" in str(error), error
    else:
        raise AssertionError
"""


@pytest.mark.slow
@pytest.mark.parametrize("keep_warm", [600, pytest.param(0, marks=pytest.mark.long)])
def test_a_shell_that_ignores_sigchld_is_no_reason_to_fail(keep_warm: int, tmp_path: Path) -> None:
    ignore = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    done = programs.run(tmp_path, IGNORING, keep_warm, preexec_fn=ignore)
    assert done.returncode == 0, done.stderr
