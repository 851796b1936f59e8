"""Programs that call MPI, as the ranks of a run."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import launched
import psutil
import pytest
import victims
import watch
from sessions import Make

from distributor import TrainingError
from distributor.launch import Mpi
from distributor.mpi.shims import find

pytest.importorskip("mpi4py")

#: Those that are tried; the programs of both live side by side.
IMPLEMENTATIONS = [name for name, program in (("mpich", "hydra_pmi_proxy"), ("openmpi", "prted")) if find(program)]

pytestmark = pytest.mark.slow

#: What a driver that is killed launches.
LAUNCH = "mpi"

#: The system in the table of docs/frameworks.md.
SYSTEM = ("MPI", "mpi4py")


@pytest.fixture(params=IMPLEMENTATIONS)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """The path with each implementation."""
    return Mpi(request.param)


@pytest.mark.framework(*SYSTEM, "all-reduce, and torch's beside it: MPICH and Open MPI")
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_all_ranks_are_mpis_processes(num_processes: int, make: Make, mpi: Mpi) -> None:
    before = left()
    run = make(num_processes, launch=mpi).submit(launched.mpi_total)
    whole = float(sum(range(1, num_processes + 1)))
    assert run.results(watch.DEADLINE) == [[whole, whole, rank, num_processes, rank] for rank in range(num_processes)]
    gone(run)
    watch.until(lambda: not left() - before)


def gone(run: Any) -> None:
    """Waits until nothing is left that this test has started."""
    watch.gone(run.id)
    watch.until(lambda: not mpis(run.id), watch.ORPHAN_DEADLINE)
    watch.until(lambda: not [folder for folder in watch.folders() if run.id in folder.name])


def mpis(run: str) -> list[psutil.Process]:
    """The processes of MPI in a run."""
    found = []
    for process in watch.processes(run):
        with suppress(psutil.Error):  # it has ended meanwhile
            if named(process):
                found.append(process)
    return found


def named(process: psutil.Process) -> str:
    """Which process of MPI it is, if it is one."""
    line, program = " ".join(process.cmdline()), Path(process.exe()).name
    return next((name for name in ("mpiexec.hydra", "hydra_pmi_proxy", "prterun", "prted") if name == program), "") or (
        "shim.py" if "shim.py" in line else ""
    )


def left() -> set[Path]:
    """What MPI keeps in files."""
    places = (("/dev/shm", "mpich*"), ("/dev/shm", "*openmpi*"), ("/dev/shm", "vader*"), ("/dev/shm", "sm_*"))
    temporary = (("/tmp", "hydra*"), ("/tmp", "ompi.*"), ("/tmp", "prte*"), ("/tmp", "pmix*"))
    return {path for folder, names in (*places, *temporary) for path in Path(folder).glob(names)}


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


@pytest.mark.framework(*SYSTEM, "errors name the rank to blame")
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (fail_in_a_collective, r"rank 1 on \S+ failed: ValueError: bad batch"),
        (abort, r"rank 1 on \S+ failed: exited with code 7"),
        (killed_by_the_kernel, r"rank 1 on \S+ failed: killed by SIGKILL"),
    ],
)
def test_the_rank_that_failed_is_the_root(function: Any, told: str, make: Make, mpi: Mpi) -> None:
    run = make(2, launch=mpi, grace_period=2).submit(function)
    with pytest.raises(TrainingError, match=told):
        run.result(watch.DEADLINE)
    gone(run)


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


def of(run: Any, *names: str) -> psutil.Process:
    return next(process for process in mpis(run.id) if named(process) in names)


KILLS = victims.kills(
    "mpi",
    rank=lambda run: victims.part(run, "launcher").children()[0],
    mpiexec=lambda run: of(run, "mpiexec.hydra", "prterun"),
    proxy=lambda run: of(run, "hydra_pmi_proxy", "prterun"),
    shim=lambda run: of(run, "shim.py"),
)


@pytest.mark.framework(*SYSTEM, "whatever is killed: a true error, nothing left")
@pytest.mark.parametrize("victim", ["none", *KILLS])
def test_nothing_is_left(victim: str, make: Make, mode: str, mpi: Mpi, tmp_path: Path) -> None:
    victims.skip_if_absent(victim, mode)
    if victim == "proxy" and mpi.implementation == "openmpi":
        pytest.skip("mpiexec is the proxy of its own host")
    before = left()
    run = make(2, launch=mpi, grace_period=10).submit(stay, str(tmp_path))
    watch.until(lambda: len([*tmp_path.glob("here-*")]) == 2, 2 * watch.DEADLINE)
    victims.strike(run, KILLS.get(victim))
    if victim in ("none", "mpiexec", "proxy", "shim"):  # their own ends cost no rank its grace period
        assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    gone(run)
    watch.until(lambda: not left() - before)


@pytest.mark.framework(*SYSTEM, "a killed driver leaves nothing")
def test_a_killed_driver_leaves_nothing(tmp_path: Path) -> None:
    run = victims.kill_a_driver(Path(__file__), tmp_path, lambda: len([*tmp_path.glob("here-*")]) == 2)
    watch.until(lambda: not mpis(run), watch.ORPHAN_DEADLINE)
    watch.gone(run)
