"""A second attempt of ranks on the same agents, as a driver orders it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import trainings
import watch
from driver import Driver, driven

from distributor.values import layout, messages


def below(driver: Driver) -> list[psutil.Process]:
    """All processes of the run but its agents."""
    return [process for agent in driver.agents() for process in agent.children(recursive=True)]


def spares(driver: Driver) -> list[psutil.Process]:
    alive = []
    for process in below(driver):
        try:
            if process.cmdline()[4:5] == ["spare"] and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(*processes: psutil.Process) -> None:
    """Kill processes, and wait until they hold nothing any more."""
    for process in processes:
        process.kill()
    watch.until(lambda: all(has_ended(process) for process in processes))


def files(driver: Driver) -> set[str]:
    """Names of what is in the nodes' folders."""
    folders = [folder for folder in watch.folders() if driver.job.run_id in folder.name]
    return {path.name for folder in folders for path in folder.iterdir()}


def outcomes(driver: Driver) -> dict[int, str]:
    return {o.rank: o.state for report in driver.result().reports for o in report.outcomes}


@pytest.mark.parametrize(
    ("how", "options"),
    [
        pytest.param("raise", {}, id="raise", marks=pytest.mark.long),
        pytest.param("SIGKILL", {}, id="SIGKILL"),
        pytest.param("SIGKILL", {"keep_warm": 0}, id="without-warm-process"),
        pytest.param("SIGKILL", {"start_method": "spawn"}, id="spawn", marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
def test_the_agents_begin_a_second_attempt(how: str, options: dict[str, Any], tmp_path: Path) -> None:
    with driven(trainings.recover, str(tmp_path), how, num_processes=3, max_restarts=1, **options) as driver:
        port = driver.port_of_node_0()
        agents = {agent.pid for agent in driver.agents()}
        left = spares(driver)
        assert len(left) == (0 if "start_method" in options else 2)
        assert {p.pid for p in below(driver) if p.status() != psutil.STATUS_ZOMBIE} == {p.pid for p in left}
        assert files(driver) == {
            "owner",
            "call",
            *(f"rank-{rank}.{stream}" for rank in (0, 1) for stream in layout.STREAMS),
        }
        ended = {outcome.rank: outcome for stopped in driver.heard(messages.Stopped) for outcome in stopped.outcomes}
        failure = ended[1].failure
        assert failure is not None
        assert failure.exception is None
        assert (failure.kind, failure.signal) == (("Diverged", None) if how == "raise" else ("signal", "SIGKILL"))
        driver.server.begin(1, port)
        assert driver.values() == [(1, 6.0)] * 3
        assert {report.host for report in driver.result().reports} == {os.uname().nodename}
    assert outcomes(driver) == {0: "finished", 1: "finished", 2: "finished"}
    assert len(driver.heard(messages.Started)) == 4
    assert len(driver.heard(messages.Hello)) == len(agents) == 2
    for rank in range(3):
        assert driver.logs[rank, 1] == b"attempt 0 of rank %d\nattempt 1 of rank %d\n" % (rank, rank)


@pytest.mark.slow
def test_a_job_without_restarts_has_neither_spares_nor_messages(tmp_path: Path) -> None:
    with driven(trainings.wait_for, str(tmp_path / "go")) as driver:
        watch.until(lambda: len(driver.heard(messages.Started)) == 2)
        assert spares(driver) == []
        driver.server.stop("enough", grace=False)
        driver.result()
    assert driver.heard(messages.Stopped) == []


def test_a_success_leaves_no_spare(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with driven(trainings.wait_for, str(tmp_path / "go"), max_restarts=1) as driver:
        assert driver.values() == [0, 1]
    assert driver.heard(messages.Stopped) == []


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "running"])
def test_an_agent_that_is_killed_leaves_nothing(waits: bool, tmp_path: Path) -> None:
    function: Any = trainings.recover if waits else trainings.wait_for
    arguments = (str(tmp_path), "SIGKILL") if waits else (str(tmp_path / "never"),)
    with driven(function, *arguments, max_restarts=1) as driver:
        if waits:
            driver.port_of_node_0()
        watch.until(lambda: len(driver.heard(messages.Started)) == 2 and len(spares(driver)) == 2)
        agent = driver.agents()[0]
        with_it = [agent, *agent.children(recursive=True)]
        agent.kill()
        _, alive = psutil.wait_procs(with_it, watch.DEADLINE)
        assert alive == []
        watch.until(lambda: driver.lost)
        driver.server.end()
        assert len(driver.result().lost_hosts) == 1


@pytest.mark.long
def test_a_spare_that_is_killed_is_replaced_by_a_new_process(tmp_path: Path) -> None:
    with driven(trainings.recover, str(tmp_path), "SIGKILL", max_restarts=1) as driver:
        port = driver.port_of_node_0()
        kill(spares(driver)[0])
        driver.server.begin(1, port)
        assert driver.values() == [(1, 3.0)] * 2


@pytest.mark.parametrize("with_spare", [True, False])
@pytest.mark.long
def test_a_launcher_that_is_killed_costs_an_attempt(with_spare: bool) -> None:
    """The ranks go with it; if the spare is killed too, the next attempt gets a new process."""
    with driven(trainings.wait_at_first, max_restarts=1, nodes=1) as driver:
        watch.until(lambda: driver.heard(messages.Started) and spares(driver))
        spare = spares(driver)[0]
        parent = spare.parent()
        assert parent is not None
        kill(*((spare, parent) if with_spare else (parent,)))
        driver.server.begin(1, driver.port_of_node_0())
        assert driver.values() == [1, 1]


def test_nodes_end_when_their_driver_has_ended(tmp_path: Path) -> None:
    with driven(trainings.recover, str(tmp_path), "SIGKILL", max_restarts=1) as driver:
        driver.port_of_node_0()
        for peer in list(driver.server._peers.values()):
            driver.server._loop.call_soon_threadsafe(peer.writer.transport.abort)
        assert outcomes(driver)[1] == "failed"
