"""Kills of everything that can be killed, while ranks train with collectives and data-loader workers."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import paths
import psutil
import pytest
import trainings
import victims
import watch
from leftovers import Leftovers
from sessions import LOCAL, Make

from distributor import NodeLostError, Run, RunCancelledError, Status, TrainingError

pytestmark = pytest.mark.chaos


def train(make: Make, path: str, tmp_path: Path) -> Run:
    """A run of four ranks that train."""
    ready = tmp_path / "ready"
    ready.mkdir()
    run = make(4, grace_period=2).submit(paths.training(path), str(ready))
    watch.until(lambda: len(os.listdir(ready)) == 4 and run.status is Status.RUNNING, 2 * watch.DEADLINE)
    return run


def rank_of(run: Run) -> psutil.Process:
    launcher = next(process for process in watch.processes(run.id) if watch.is_launcher(process))
    return launcher.children()[-1]


#: What torch says of a worker that is gone; a rank that was just taking a tensor over from it says how that broke.
DATA_LOADER = r"^rank \d on .* failed: (RuntimeError: DataLoader worker|Connection\w+Error|EOFError|FileNotFoundError)"

agent_of: victims.Victim = partial(victims.part, name="agent")

KILLS: dict[str, tuple[victims.Victim, str]] = {
    **victims.KILLS,
    "data-loader worker": (lambda run: rank_of(run).children()[0], DATA_LOADER),
    "worker": (lambda run: watch.owner_of(agent_of(run)), r"^lost the node on .*: its Spark task ended"),
}


@pytest.mark.long_on_executors
@pytest.mark.parametrize("victim", KILLS)
def test_a_kill_is_a_true_error_and_leaves_nothing(
    victim: str, make_on_path: Make, path: str, mode: str, tmp_path: Path, leftovers: Leftovers
) -> None:
    if mode == LOCAL and victim in ("worker", "executor"):
        pytest.skip("there is none on this machine")
    training = train(make_on_path, path, tmp_path)
    victims.strike(training, KILLS[victim])
    leftovers.gone(training.id)
    assert make_on_path(2).run(trainings.all_reduce) == 3.0  # Spark's workers are still of use


@pytest.mark.long_on_executors
@pytest.mark.slow
def test_an_agent_killed_before_its_first_message_is_a_lost_node(
    make_on_path: Make, tmp_path: Path, leftovers: Leftovers
) -> None:
    """The others would wait for its ranks until the start timeout."""

    def agents() -> list[psutil.Process]:
        return [process for process in watch.processes() if watch.is_agent(process)]

    make_on_path(4).run(
        trainings.all_reduce
    )  # takes all slots: no task of another run still starts an agent after that
    watch.until(lambda: not agents())
    run = make_on_path(4, grace_period=1).submit(trainings.wait_for, str(tmp_path / "never"))
    try:
        watch.until(agents)[0].kill()
        with pytest.raises(NodeLostError):
            run.result(timeout=watch.DEADLINE)
    finally:
        run.cancel()  # the tests after this one need its slots
    leftovers.gone(run.id)
    assert make_on_path(2).run(trainings.all_reduce) == 3.0


@pytest.mark.long_on_executors
def test_a_stopped_rank_does_not_hold_up_the_end(
    make_on_path: Make, path: str, tmp_path: Path, leftovers: Leftovers
) -> None:
    """SIGSTOP: it cannot react to SIGTERM."""
    training = train(make_on_path, path, tmp_path)
    rank_of(training).suspend()
    training.cancel()
    with pytest.raises(RunCancelledError):
        training.result(timeout=watch.DEADLINE)
    leftovers.gone(training.id)


def test_a_frozen_agent_is_a_lost_node(make_local: Make, tmp_path: Path) -> None:
    run = make_local(2, heartbeat_timeout=2, grace_period=1).submit(trainings.wait_for, str(tmp_path / "never"))
    watch.until(lambda: run.status is Status.RUNNING)
    agent_of(run).suspend()
    with pytest.raises(NodeLostError, match=r"nothing was heard from it for 2 s; last known state, .*: \d ranks"):
        run.result(timeout=watch.DEADLINE)
    watch.gone(run.id)


@pytest.mark.long_on_executors
def test_a_kill_for_lack_of_memory_is_explained(make: Make, small_memory: Path) -> None:
    def devour(group: str) -> None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        kept = [b"x" * (8 << 20) for _ in range(32)]
        raise RuntimeError(f"no limit: {len(kept)} pieces of 8 MiB")

    run = make(2, grace_period=1).submit(devour, str(small_memory))
    with pytest.raises(TrainingError, match="killed by SIGKILL, most likely for lack of memory"):
        run.result(timeout=2 * watch.DEADLINE)
    watch.gone(run.id)


@pytest.mark.long_on_executors
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long_on_executors)])
@pytest.mark.slow
def test_nothing_outlives_the_driver(
    number: signal.Signals, path: str, mode: str, tmp_path: Path, leftovers: Leftovers
) -> None:
    victims.kill_a_driver(path, mode, 4, tmp_path, leftovers, number)
