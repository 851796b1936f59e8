"""Programs that call MPI, as the ranks of a run."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import launched
import pytest
import victims
import watch
from leftovers import Leftovers
from sessions import LOCAL, Make

from distributor import CompanionError, TrainingError
from distributor.launch import Mpi
from distributor.launch.mpi.programs import find
from distributor.machine import folders, shared_memory
from distributor.values.environment import NODE_ID

pytest.importorskip("mpi4py")

#: Those that are tried; the programs of both live side by side.
IMPLEMENTATIONS = [name for name, program in (("mpich", "hydra_pmi_proxy"), ("openmpi", "prted")) if find(program)]

pytestmark = pytest.mark.slow

#: The system in the table of docs/frameworks.md.
SYSTEM = ("MPI", "mpi4py")


@pytest.fixture(params=IMPLEMENTATIONS)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """The path with each implementation."""
    return Mpi(request.param)


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "all-reduce by MPI and by torch, with MPICH and Open MPI")
@pytest.mark.parametrize("num_processes", [2, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 4))])
def test_all_ranks_are_mpis_processes(num_processes: int, make: Make, mpi: Mpi, leftovers: Leftovers) -> None:
    run = make(num_processes, launch=mpi).submit(launched.mpi_total)
    whole = float(sum(range(1, num_processes + 1)))
    assert run.results(watch.DEADLINE) == [[whole, whole, rank, num_processes, rank] for rank in range(num_processes)]
    leftovers.gone(run.id)


def return_at_different_times() -> int:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        time.sleep(1.0)
    return int(MPI.COMM_WORLD.rank)


def test_mpi_is_finalized_for_ranks_that_return(make_local: Make, mpi: Mpi) -> None:
    """Else the first to end would take the others along."""
    assert make_local(2, launch=mpi).submit(return_at_different_times).results(watch.DEADLINE) == [0, 1]


def finalize() -> bool:
    from mpi4py import MPI

    MPI.Finalize()
    return bool(MPI.Is_finalized())


def test_ranks_may_finalize_themselves_or_never_use_mpi(make_local: Make, mpi: Mpi) -> None:
    assert make_local(2, launch=mpi).submit(finalize).results(watch.DEADLINE) == [True, True]
    assert make_local(2, launch=mpi).submit(os.getpid).result(watch.DEADLINE) > 0


def fail_in_a_collective() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.barrier()
    if world.rank == 1:
        raise ValueError("bad batch")
    world.barrier()


def abort() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        MPI.COMM_WORLD.Abort(7)
    time.sleep(600)


def killed_by_the_kernel() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "the first rank that fails")
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (fail_in_a_collective, r"rank 1 on \S+ failed: ValueError: bad batch"),
        pytest.param(abort, r"rank 1 on \S+ failed: exited with code 7", marks=pytest.mark.long),
        (killed_by_the_kernel, r"rank 1 on \S+ failed: killed by SIGKILL"),
    ],
)
def test_the_rank_that_failed_is_the_root(function: Any, text: str, make: Make, mpi: Mpi, leftovers: Leftovers) -> None:
    run = make(2, launch=mpi, grace_period=2).submit(function)
    with pytest.raises(TrainingError, match=text):
        run.result(watch.DEADLINE)
    leftovers.gone(run.id)


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "MPI_Comm_spawn")
def test_ranks_spawn_processes(make: Make, mpi: Mpi, leftovers: Leftovers, capfd: pytest.CaptureFixture[str]) -> None:
    run = make(2, launch=mpi, env={"MARK": "x"}).submit(launched.add_with_spawned, 3, launched.SPAWNED, "spawn")
    (total, seen), *_ = run.results(2 * watch.DEADLINE)
    assert total == 5
    assert [result[:2] for result in seen] == [["x", None]] * 3
    output = capfd.readouterr().out
    for number in range(3):
        assert re.search(rf"^\[rank \d \S+\] spawned {number} has added$", output, re.MULTILINE)
    leftovers.gone(run.id)


def map_in_a_pool() -> list[int]:
    from mpi4py import MPI
    from mpi4py.futures import MPIPoolExecutor

    if MPI.COMM_WORLD.rank != 0:
        return []
    with MPIPoolExecutor(3) as pool:
        return list(pool.map(abs, [-1, -2, -3]))


def test_ranks_use_pools(make_local: Make, mpi: Mpi) -> None:
    assert make_local(2, launch=mpi).submit(map_in_a_pool).results(watch.DEADLINE) == [[1, 2, 3], []]


def wait_for_spawned(*words: str) -> None:
    launched.spawn(2, *words).recv()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exits", r"ended with code 3"),
        ("aborts", r"(called MPI_Abort\(7\)|ended with code 7)"),
        ("dies", r"was killed by SIGKILL"),
    ],
)
def test_a_spawned_process_that_fails_fails_the_run(
    how: str, text: str, make_local: Make, mpi: Mpi, leftovers: Leftovers
) -> None:
    run = make_local(2, launch=mpi, grace_period=2).submit(wait_for_spawned, launched.SPAWNED, "fail", how)
    with pytest.raises(CompanionError, match=rf"MPI_Comm_spawn had started {text}: \S+ \S+/spawned.py fail {how}"):
        run.result(watch.DEADLINE)
    leftovers.gone(run.id)


def return_before_spawned(program: str, folder: str) -> None:
    launched.spawn(1, program, "outlive", folder).Disconnect()
    Path(folder, f"returns-{os.environ['RANK']}").touch()


def test_a_run_waits_for_processes_that_its_ranks_have_spawned(
    make_local: Make, mpi: Mpi, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As mpiexec does."""
    run = make_local(2, launch=mpi).submit(return_before_spawned, launched.SPAWNED, str(tmp_path))
    watch.until(lambda: len([*tmp_path.iterdir()]) == 3)
    with pytest.raises(TimeoutError):
        run.result(1.0)
    (tmp_path / "go").touch()
    run.result(watch.DEADLINE)
    assert "spawned says goodbye" in capfd.readouterr().out


def are_noted(run: str) -> bool:
    """Whether a killed agent leaves a list of its processes' shared memory."""
    lists = [path.read_text() for path in Path(tempfile.gettempdir()).glob(f"{folders.PREFIX}{run}*/elsewhere")]
    names = shared_memory.mapped(process.pid for process in watch.processes(run))
    return all(any(name in text for text in lists) for name in names)


@pytest.mark.framework(*SYSTEM, "the death of a process, with spawned ones")
@pytest.mark.parametrize(
    ("mode", "victim"),
    victims.cases(["none", "rank", "agent", "executor", "spawned"], ["none", "rank", "spawned"], ["rank"]),
    indirect=["mode"],
)
def test_nothing_is_left_of_spawned_processes(
    victim: str, make: Make, mpi: Mpi, tmp_path: Path, leftovers: Leftovers
) -> None:
    run = make(2, launch=mpi, grace_period=2).submit(wait_for_spawned, launched.SPAWNED, "stay", str(tmp_path))
    watch.until(lambda: len([*tmp_path.glob("spawned-*")]) == 2, 2 * watch.DEADLINE)
    watch.until(lambda: are_noted(run.id))
    kills = {**victims.KILLS, "spawned": (victims.program("spawned.py"), victims.COMPANION)}
    victims.strike(run, kills.get(victim))
    leftovers.gone(run.id)


def stay(folder: str) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank

    def save(*_: Any) -> None:
        Path(folder, f"saved-{rank}").touch()
        sys.exit()

    signal.signal(signal.SIGTERM, save)
    MPI.COMM_WORLD.barrier()
    Path(folder, f"here-{rank}").touch()
    time.sleep(600)


#: On one machine, Open MPI's mpiexec is its daemon, too.
KILLS = victims.with_companions(
    mpiexec=victims.program(*victims.MPIEXEC), proxy=victims.program("hydra_pmi_proxy"), shim=victims.program("shim.py")
)


def victims_of(implementation: str) -> list[str]:
    return [victim for victim in ["none", *KILLS] if victim != "proxy" or implementation == "mpich"]


@pytest.mark.framework(*SYSTEM, "the death of a process")
@pytest.mark.parametrize(
    ("mpi", "mode", "victim"),
    [
        pytest.param(name, *case.values, marks=case.marks)
        for name in IMPLEMENTATIONS
        for case in victims.cases(victims_of(name), victims_of(name), victims_of(name))
    ],
    indirect=["mpi", "mode"],
)
def test_nothing_is_left(victim: str, make: Make, mpi: Mpi, tmp_path: Path, leftovers: Leftovers) -> None:
    run = make(2, launch=mpi, grace_period=10).submit(stay, str(tmp_path))
    watch.until(lambda: len([*tmp_path.glob("here-*")]) == 2, 2 * watch.DEADLINE)
    victims.strike(run, KILLS.get(victim))
    if victim in ("none", "mpiexec", "proxy", "shim"):  # their own ends cost no rank its grace period
        assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    leftovers.gone(run.id)


def import_without_manager() -> None:
    """Open MPI then makes a folder of its own."""
    import psutil

    for process in psutil.process_iter():
        if process.name() == "prterun" and process.environ().get("DISTRIBUTOR_MPI_NODE") == os.environ[NODE_ID]:
            process.kill()
            process.wait(watch.DEADLINE)
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    time.sleep(watch.DEADLINE)


@pytest.mark.ci
@pytest.mark.skipif("openmpi" not in IMPLEMENTATIONS, reason="needs Open MPI")
def test_nothing_is_left_of_a_rank_that_initializes_mpi_after_its_manager_was_killed(
    make_local: Make, leftovers: Leftovers
) -> None:
    run = make_local(1, launch=Mpi("openmpi")).submit(import_without_manager)
    with pytest.raises(CompanionError, match="prterun was killed by SIGKILL"):
        run.result(watch.DEADLINE)
    leftovers.gone(run.id, 10.0)


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "the death of the driver")
@pytest.mark.parametrize(
    "path", [pytest.param(name, marks=pytest.mark.long if name == "openmpi" else ()) for name in IMPLEMENTATIONS]
)
def test_a_killed_driver_leaves_nothing(path: str, tmp_path: Path, leftovers: Leftovers) -> None:
    victims.kill_a_driver(path, LOCAL, 2, tmp_path, leftovers)
