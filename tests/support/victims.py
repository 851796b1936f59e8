"""What tests kill of a run, and how."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import watch
from sessions import LOCAL

from distributor import DistributorError, Run, RunCancelledError

#: What is said of a node whose agent or executor was killed.
LOST = "lost the node on|its agent|its Spark task"

Victim = Callable[[Run], psutil.Process]


def part(run: Run, name: str) -> psutil.Process:
    """A process of this package by what it is: agent, launcher, companion."""
    return next(process for process in watch.processes(run.id) if watch.part(process) == name)


def executor_of(run: Run) -> psutil.Process:
    owners = watch.owners_of(part(run, "agent"))
    return next(owner for owner in owners if "CoarseGrainedExecutorBackend" in " ".join(owner.cmdline()))


def kills(path: str, rank: Victim, **programs: Victim) -> dict[str, tuple[Victim, str]]:
    """What can be killed of a run with companions, each with what the error says then.

    Args:
        path: name of the companions.
        rank: finds a rank.
        programs: find programs that the companions run, by their names, with underscores for blanks.
    """
    companion = rf"the companion {path} on \S+ (exited with code|was killed by)"
    return {
        **{name.replace("_", " "): (find, companion) for name, find in programs.items()},
        "companion": (lambda run: part(run, "companion"), companion),
        "rank": (rank, r"rank \d on .* failed: killed by SIGKILL"),
        "launcher": (
            lambda run: part(run, "launcher"),
            f"process that started it|launcher was killed by SIGKILL|{LOST}",
        ),
        "agent": (lambda run: part(run, "agent"), LOST),
        "executor": (executor_of, LOST),
    }


def skip_if_absent(victim: str, mode: str) -> None:
    """Skips a test of what does not exist where a run goes."""
    if (victim == "worker" and mode == LOCAL) or (victim == "executor" and not mode.startswith("local-cluster")):
        pytest.skip(f"there is no {victim} in {mode}")


def strike(run: Run, kill: tuple[Victim, str] | None) -> None:
    """Kills a process of a run, or cancels the run, and checks the error that follows."""
    if kill is None:
        run.cancel()
        with pytest.raises(RunCancelledError):
            run.result(watch.DEADLINE)
        return
    find, told = kill
    find(run).kill()
    with pytest.raises(DistributorError) as caught:
        run.result(watch.DEADLINE)
    assert re.search(told, str(caught.value)), caught.value


DRIVER = """
import sys
sys.path[:0] = sys.argv[2:]
import {module} as tests
from distributor import Distributor
run = Distributor(2, local_mode=True, use_gpu=False, launch=tests.LAUNCH).submit(tests.stay, sys.argv[1])
print(run.id, flush=True)
run.result()
"""


def kill_a_driver(tests: Path, argument: Path, ready: Callable[[], bool]) -> str:
    """Kills a driver whose two ranks run ``stay(argument)`` of a module on its ``LAUNCH``. Returns its run's name.

    Args:
        tests: the module's file.
        argument: what ranks are given.
        ready: returns whether ranks are where they are to be killed.
    """
    folders = [str(tests.parent), str(Path(__file__).parent)]
    command = [sys.executable, "-c", DRIVER.format(module=tests.stem), str(argument), *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        try:
            watch.until(ready, 2 * watch.DEADLINE)
            return driver.stdout.readline().strip()
        finally:
            driver.kill()
