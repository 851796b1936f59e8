"""What tests kill of a run, and how."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import paths
import psutil
import pytest
import watch
from leftovers import Leftovers, processes
from sessions import LOCAL, MASTERS

from distributor import DistributorError, Run, RunCancelledError

#: What is said of a node whose agent or executor was killed.
LOST = "lost the node on|its agent|its Spark task"

#: What is said of a rank, of any companion and of a launcher that were killed.
RANK = r"rank \d on .* failed: killed by SIGKILL"
COMPANION = r"the companion \w+ on \S+ (exited with code|was killed by)"
LAUNCHER = f"process that started it|launcher was killed by SIGKILL|{LOST}"

Victim = Callable[[Run], psutil.Process]

#: The programs that launch paths run beside ranks, by what they are. Open MPI's mpiexec is its own host's daemon.
HEAD = ("gcs_server",)
MPIEXEC = ("mpiexec.hydra", "prterun")
DAEMON = ("hydra_pmi_proxy", "prted", "prterun", "raylet")


def part(run: Run, name: str) -> psutil.Process:
    """A process of this package by what it is: agent, launcher, companion."""
    return next(each for each in watch.processes(run.id) if watch.part(each) == name and not watch.is_fork(each))


def programs(run: Run, *names: str) -> list[psutil.Process]:
    """The processes of a run that run one of some programs, scripts or modules."""
    running = []
    for process in processes(run.id):
        with suppress(psutil.Error):
            words = [process.exe(), *process.cmdline()]
            if any(word in names or Path(word).name in names for word in words):
                running.append(process)
    return running


def program(*names: str) -> Victim:
    """Finds a process by what it runs."""
    return lambda run: programs(run, *names)[0]


def executor_of(run: Run) -> psutil.Process:
    owners = watch.owners_of(part(run, "agent"))
    return next(owner for owner in owners if "CoarseGrainedExecutorBackend" in " ".join(owner.cmdline()))


def node_of(run: Run, *, with_executor: bool) -> list[psutil.Process]:
    """All processes of a node of a run, as systemd finds them: with its executor and all Python workers, if asked."""
    agent = part(run, "agent")
    parents = [parent for parent in agent.parents() if watch.part(parent)]
    executor = executor_of(run) if with_executor else None
    outside = [] if executor is None else [executor, *executor.children(recursive=True)]
    return list({*parents, agent, *agent.children(recursive=True), *outside})


def reported_rank(run: Run) -> psutil.Process:
    """The highest rank of the latest attempt, which has reported its pid."""
    rows = tuple(run.metrics)
    latest = max(row.attempt for row in rows)
    pids = {row.rank: int(row.values["pid"]) for row in rows if row.attempt == latest and "pid" in row.values}
    return psutil.Process(pids[max(pids)])


#: What can be killed of a run whose ranks report their pids.
FINDS: dict[str, Victim] = {
    "rank": reported_rank,
    "agent": lambda run: part(run, "agent"),
    "worker": lambda run: watch.owner_of(part(run, "agent")),
    "executor": executor_of,
}

#: What can be killed of any run, each with what the error says then.
KILLS: dict[str, tuple[Victim, str]] = {
    "rank": (lambda run: part(run, "launcher").children()[0], RANK),
    "launcher": (lambda run: part(run, "launcher"), LAUNCHER),
    "agent": (lambda run: part(run, "agent"), LOST),
    "executor": (executor_of, LOST),
}


def with_companions(**programs: Victim) -> dict[str, tuple[Victim, str]]:
    """The same of a run with companions, and programs that these run, by their names with underscores for blanks."""
    victims: dict[str, Victim] = {**programs, "companion": lambda run: part(run, "companion")}
    return {**{name.replace("_", " "): (find, COMPANION) for name, find in victims.items()}, **KILLS}


def ranks(path: str, number: int, folder: Path) -> dict[str, tuple[Victim, str]]:
    """The ranks of a training as victims, by the names of the files in which they have written their pids."""

    def find(name: str) -> Victim:
        return lambda run: psutil.Process(int((folder / name).read_text()))

    names = paths.names(path, number)
    return {name: (find(name), rf"rank {rank} on \S+ failed: killed by SIGKILL") for rank, name in enumerate(names)}


def cases(victims: Iterable[str], local: Collection[str], executors: Collection[str]) -> list[Any]:
    """The modes with the victims that there are in each, to parametrize a test by ``mode`` (indirect) and ``victim``.

    Args:
        victims: all of them. CI kills some; ``make test-long`` kills all.
        local: those that CI kills on this machine.
        executors: those that CI kills on executors.
    """
    params = []
    for mode, often, marks in ((LOCAL, local, ()), (MASTERS[-1], executors, (pytest.mark.spark,))):
        for victim in victims:
            if victim != "executor" or mode != LOCAL:
                rare = () if victim in often else (pytest.mark.long,)
                params.append(pytest.param(mode, victim, marks=(*marks, *rare)))
    return params


def strike(run: Run, kill: tuple[Victim, str] | None) -> None:
    """Kills a process of a run, or cancels the run, and checks the error that follows."""
    if kill is None:
        run.cancel()
        with pytest.raises(RunCancelledError):
            run.result(watch.DEADLINE)
        return
    find, text = kill
    find(run).kill()
    with pytest.raises(DistributorError) as caught:
        run.result(watch.DEADLINE)
    assert re.search(text, str(caught.value)), caught.value
    assert "\tat " not in str(caught.value)  # of a Java stack


def await_ranks(path: str, number: int, folder: Path) -> None:
    """Waits until all ranks of a training train."""
    ready = [folder / name for name in paths.names(path, number)]
    watch.until(lambda: all(path.exists() for path in ready), 2 * watch.DEADLINE)


class Driver:
    """A driver in a process of its own, whose ranks train on some path.

    Args:
        path: the launch path.
        mode: where the run goes.
        ranks: number of them.
        folder: where each says that it trains.
    """

    def __init__(self, path: str, mode: str, ranks: int, folder: Path) -> None:
        self._training = path, ranks, folder
        arguments = [mode, path, str(ranks), str(folder), str(Path(__file__).parent)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.run = self._process.stdout.readline().strip()
        assert self.run, "the driver has started no run"

    def await_ranks(self) -> None:
        """Waits until all ranks train."""
        try:
            await_ranks(*self._training)
        except AssertionError:
            self.kill()
            raise

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends the driver, and asserts that what it has started, and what is kept warm for it, soon ends as well."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        owners = [self._process.pid, *(process.pid for process in family)]
        warm = [warm_process for owner in owners for warm_process in watch.warm_processes(owner)]
        folders = [Path(process.cmdline()[6]) for process in warm]
        self._process.send_signal(number)
        self._process.communicate(timeout=watch.DEADLINE)
        _, alive = psutil.wait_procs([*family, *warm], watch.DEADLINE)
        assert not alive
        watch.until(lambda: not [folder for folder in folders if folder.exists()], watch.DEADLINE)


def kill_a_driver(
    path: str, mode: str, ranks: int, folder: Path, leftovers: Leftovers, number: signal.Signals = signal.SIGKILL
) -> None:
    """Ends a driver whose ranks train, and asserts that nothing is left."""
    driver = Driver(path, mode, ranks, folder)
    driver.await_ranks()
    driver.kill(number)
    leftovers.gone(driver.run)


_DRIVER = """
import sys
mode, path, ranks, folder, support = sys.argv[1:]
sys.path.insert(0, support)
import paths
if mode != "local":
    from pyspark.sql import SparkSession
    spark = SparkSession.builder.master(mode).config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
distributor = paths.distributor(path, int(ranks), mode == "local", grace_period=1, logs="none")
run = distributor.submit(paths.training(path), folder)
print(run.id, flush=True)
run.wait()
"""
