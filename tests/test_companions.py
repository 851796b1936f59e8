"""Companions: processes that live beside the ranks of a node."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import accompanied
import psutil
import pytest
import trainings
import watch
from accompanied import Accompanied
from driver import Driver, driven, submit

from distributor import CompanionError, RunCancelledError, StartError, Status, TrainingError
from distributor.values import messages
from distributor.values.plan import Call


def processes_in(folder: Path) -> list[psutil.Process]:
    """The companions that have written files, and their children."""
    pids = [int(pid) for path in folder.glob("companion-?") for pid in path.read_text().split()[:2]]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def is_gone(processes: list[psutil.Process], run: str) -> None:
    _, alive = psutil.wait_procs(processes, watch.DEADLINE)
    assert alive == []
    watch.gone(run)


@pytest.mark.parametrize("nodes", [(0, 1), (1,), ()])
def test_companions_begin_before_the_ranks(nodes: tuple[int, ...], tmp_path: Path) -> None:
    launch = Accompanied("serve", {"folder": str(tmp_path)}, nodes)
    run = submit(accompanied.see, str(tmp_path), launch=launch)
    here = run.results(timeout=2 * watch.DEADLINE)
    for rank in nodes:
        assert f"companion-{rank}" in here[rank]
        assert f"of node {rank}" in (tmp_path / f"companion-{rank}").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {f"companion-{rank}" for rank in nodes}
    is_gone(processes_in(tmp_path), run.id)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "message"), [(3, "exited with code 3"), (-9, "was killed by SIGKILL"), (0, "code 0")])
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_death_of_a_companion_ends_the_run(how: int, message: str, node: int, tmp_path: Path) -> None:
    dies = str(tmp_path / "started")
    launch = Accompanied("fail", {"when": "later", "how": how, "path": dies}, (node,))
    run = submit(accompanied.touch_and_wait, dies, str(tmp_path / "never"), launch=launch)
    with pytest.raises(CompanionError) as caught:
        run.result(timeout=2 * watch.DEADLINE)
    text = str(caught.value)
    assert text.startswith(f"the companion helper on {os.uname().nodename} ")
    assert message in text.splitlines()[0]
    assert text.endswith("\n\nIts last lines:\ncareful\nport 0 is taken")
    assert run.status is Status.FAILED
    is_gone([], run.id)


def test_a_companion_that_fails_before_it_is_ready_starts_no_rank(tmp_path: Path) -> None:
    launch = Accompanied("fail", {"when": "at once", "how": 3}, (0,))
    run = submit(accompanied.touch_and_wait, str(tmp_path / "started"), str(tmp_path / "never"), launch=launch, nodes=1)
    with pytest.raises(CompanionError, match="exited with code 3 before it was ready\n\nIts last lines:\ncareful"):
        run.result(timeout=2 * watch.DEADLINE)
    assert not (tmp_path / "started").exists()
    is_gone([], run.id)


def test_a_companion_that_never_gets_ready_is_a_late_start(tmp_path: Path) -> None:
    launch = Accompanied("never_ready", {}, (1,))
    run = submit(accompanied.see, str(tmp_path), launch=launch, start_timeout=3.0)
    with pytest.raises(StartError, match="start_timeout"):
        run.result(timeout=2 * watch.DEADLINE)
    is_gone([], run.id)


def test_a_node_that_cannot_be_planned_ends_the_run_at_once(tmp_path: Path) -> None:
    """The other node does not wait for it until start_timeout has passed."""
    launch = Accompanied("serve", {"folder": str(tmp_path)}, (), unplanned=(1,))
    run = submit(accompanied.see, str(tmp_path), launch=launch, max_restarts=1)
    with pytest.raises(StartError, match="^there is no plan for node 1$"):
        run.result(timeout=watch.DEADLINE)
    is_gone([], run.id)


def touch_and_fail(path: str) -> None:
    Path(path).touch()
    raise ValueError("the rank's own")


def test_companions_end_when_a_rank_fails(tmp_path: Path) -> None:
    launch = Accompanied("serve", {"folder": str(tmp_path)})
    run = submit(touch_and_fail, str(tmp_path / "failing"), launch=launch)
    with pytest.raises(TrainingError, match="the rank's own"):
        run.result(timeout=2 * watch.DEADLINE)
    is_gone(processes_in(tmp_path), run.id)


@pytest.mark.parametrize("function", ["serve", "stubborn"])
def test_companions_end_when_the_run_is_cancelled(function: str, tmp_path: Path) -> None:
    launch = Accompanied(function, {"folder": str(tmp_path)})
    run = submit(accompanied.touch_and_wait, str(tmp_path / "started"), str(tmp_path / "never"), launch=launch)
    watch.until(lambda: (tmp_path / "started").exists(), 2 * watch.DEADLINE)
    processes = processes_in(tmp_path)
    assert len(processes) == 4
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(timeout=watch.DEADLINE)
    is_gone(processes, run.id)


@pytest.mark.parametrize("with_ranks", [True, False])
def test_companions_end_when_their_agent_is_killed(with_ranks: bool, tmp_path: Path) -> None:
    launch = Accompanied("serve" if with_ranks else "never_ready", {"folder": str(tmp_path)})
    function = accompanied.touch_and_wait
    with driven(function, str(tmp_path / "started"), str(tmp_path / "never"), launch=launch) as driver:
        if with_ranks:
            watch.until(lambda: (tmp_path / "started").exists(), 2 * watch.DEADLINE)
        watch.until(lambda: len(helpers(driver)) == 2, 2 * watch.DEADLINE)
        processes = [*helpers(driver), *processes_in(tmp_path)]
        for agent in driver.agents():
            with suppress(psutil.NoSuchProcess):  # it has heard of the other one's end
                agent.kill()
        _, alive = psutil.wait_procs(processes, watch.DEADLINE)
        assert alive == []


def parts(driver: Driver, name: str) -> list[psutil.Process]:
    """Children of agents that are launchers or companions."""
    return [child for agent in driver.agents() for child in agent.children() if watch.part(child) == name]


def helpers(driver: Driver) -> list[psutil.Process]:
    return parts(driver, "companion")


def return_first(path: str, go: str) -> int:
    """Rank 1 returns at once, and rank 0 when its file is there."""
    if os.environ["RANK"] == "1":
        return 1
    while not os.path.exists(go):
        time.sleep(0.02)
    return 0


@pytest.mark.long
def test_a_companion_may_end_after_the_ranks_of_its_node(tmp_path: Path) -> None:
    """It ends while another node's rank runs."""
    ended = str(tmp_path / "ended")
    launch = Accompanied("end", {"path": ended}, (1,))
    with driven(return_first, "", str(tmp_path / "go"), launch=launch) as driver:
        watch.until(lambda: len(driver.heard(messages.Started)) == 2, 2 * watch.DEADLINE)
        companions = watch.until(lambda: helpers(driver))
        watch.until(lambda: ranks_of(driver, companions[0]) == 0)
        Path(ended).touch()
        psutil.wait_procs(companions, watch.DEADLINE)
        (tmp_path / "go").touch()
        assert driver.values() == [0, 1]
    assert all(report.error is None for report in driver.result().reports)


def ranks_of(driver: Driver, companion: psutil.Process) -> int:
    """The number of living ranks of a companion's node."""
    agent = companion.parent()
    assert agent is not None
    launchers = [child for child in agent.children() if watch.part(child) == "launcher"]
    return sum(rank.status() != psutil.STATUS_ZOMBIE for launcher in launchers for rank in launcher.children())


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.slow
def test_other_nodes_hear_of_a_companions_death_over_the_store(once: bool, tmp_path: Path) -> None:
    """The driver orders nothing, as where it cannot be reached."""
    dies = str(tmp_path / "started")
    launch = Accompanied("fail", {"when": "later", "how": 3, "path": dies}, (1,), once=once)
    function = accompanied.touch_and_wait
    with driven(function, dies, str(tmp_path / "never"), launch=launch, stops=False) as driver:
        reports = sorted(driver.result().reports, key=lambda report: report.node_rank)
    assert [report.error and report.error[0] for report in reports] == [None, "CompanionError"]


@pytest.mark.long
def test_nodes_without_ranks_hear_of_a_failure_over_the_store(tmp_path: Path) -> None:
    launch = Accompanied("serve", {"folder": str(tmp_path)}, (1,), once=True)
    with driven(touch_and_fail, str(tmp_path / "failing"), launch=launch, stops=False) as driver:
        reports = sorted(driver.result().reports, key=lambda report: report.node_rank)
    assert [[outcome.state for outcome in report.outcomes] for report in reports] == [["failed"], []]


def touch_and_save(folder: str) -> None:
    """Says that it runs, and when it is told to stop, notes which companions are there a second later."""

    def save(*_: Any) -> None:
        time.sleep(1.0)
        companions = {path.name: int(path.read_text().split()[0]) for path in Path(folder).glob("companion-?")}
        there = [name for name, pid in companions.items() if os.path.exists(f"/proc/{pid}")]
        Path(folder, "saved").write_text(" ".join(sorted(there)))
        sys.exit()

    signal.signal(signal.SIGTERM, save)
    accompanied.touch_and_wait(os.path.join(folder, "started"), "")


@pytest.mark.long
def test_companions_of_nodes_without_ranks_stay_while_others_save(tmp_path: Path) -> None:
    launch = Accompanied("serve", {"folder": str(tmp_path)}, once=True)
    run = submit(touch_and_save, str(tmp_path), launch=launch, grace_period=60.0)
    watch.until(lambda: (tmp_path / "started").exists() and run.status is Status.RUNNING, 2 * watch.DEADLINE)
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(timeout=watch.DEADLINE)  # once the rank has saved, nobody waits for the rest of the grace period
    assert (tmp_path / "saved").read_text() == "companion-0 companion-1"
    is_gone(processes_in(tmp_path), run.id)


def test_ranks_stopped_before_they_began_give_no_warning(tmp_path: Path) -> None:
    """Those of node 0 are forked, and wait for node 1."""
    launch = Accompanied("never_ready", nodes=(1,))
    with driven(accompanied.see, str(tmp_path), launch=launch, grace_period=60.0) as driver:
        watch.until(lambda: sum(len(launcher.children()) for launcher in parts(driver, "launcher")), 2 * watch.DEADLINE)
        driver.server.stop("enough")
        reports = driver.result().reports
    assert [report.warnings for report in reports] == [(), ()]


@pytest.mark.long
def test_companions_begin_again_with_a_second_attempt() -> None:
    launch = Accompanied("fail", {"when": "at once", "how": 3, "attempts": 1}, (1,), restarts=True)
    with driven(trainings.wait_at_first, launch=launch, max_restarts=1) as driver:
        port = driver.port_of_node_0()
        errors = [stopped.error for stopped in driver.heard(messages.Stopped) if stopped.error is not None]
        assert [kind for kind, _ in errors] == ["CompanionError"]
        assert helpers(driver) == []
        driver.server.begin(1, port)
        assert driver.values() == [1, 1]


def test_reserved_ports_are_the_companions_own(tmp_path: Path) -> None:
    launch = Accompanied("serve", {"folder": str(tmp_path)}, ports=2)
    function = accompanied.touch_and_wait
    with driven(function, str(tmp_path / "started"), str(tmp_path / "go"), launch=launch) as driver:
        watch.until(lambda: (tmp_path / "started").exists(), 2 * watch.DEADLINE)
        ports = [int(port) for path in tmp_path.glob("companion-?") for port in path.read_text().split()[5:]]
        assert len(set(ports)) == 4
        for port in ports:
            socket.create_connection(("127.0.0.1", port), 5.0).close()
        (tmp_path / "go").touch()
        driver.result()


def test_what_ranks_do_before_their_function_is_not_its_time() -> None:
    """As for building DeepSpeed's extensions."""
    launch = Accompanied("", nodes=(), first=Call("accompanied", "build", {"seconds": 1.0}))
    run = submit(trainings.rank, launch=launch)
    run.results(timeout=2 * watch.DEADLINE)
    assert run.timings["call"] > 1.0
