"""Shared memory of ranks goes with them when they are stopped, and what others need stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import programs
import pytest
import watch
from sessions import Make

from distributor import RunCancelledError

SHM = Path("/dev/shm")


@pytest.fixture
def name(tmp_path: Path) -> Iterator[str]:
    """A prefix of names that no other test has."""
    prefix = f"psm_{abs(hash(tmp_path)):x}"
    yield prefix
    for path in SHM.glob(f"{prefix}*"):
        path.unlink()


def files(name: str) -> set[str]:
    return {path.name.removeprefix(name) for path in SHM.glob(f"{name}*")}


def hold(name: str, before: str, ready: str) -> None:
    """Makes shared memory that Python knows of and some that it does not, maps older memory, and waits for ever."""
    from multiprocessing import resource_tracker

    kept = [SharedMemory(f"{name}1", create=True, size=8), SharedMemory(f"{name}2", create=True, size=8)]
    resource_tracker.unregister(f"/{name}2", "shared_memory")
    kept.append(SharedMemory(before))
    resource_tracker.unregister(f"/{before}", "shared_memory")
    kept[-1].buf[0] = 1
    Path(ready).touch()
    while kept:
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["kill", "cancel"])
def test_a_run_that_is_stopped_leaves_none(make_local: Make, name: str, end: str, tmp_path: Path) -> None:
    older = SharedMemory(f"{name}3", create=True, size=8)
    older.close()
    run = make_local(1, grace_period=1).submit(hold, name, f"{name}3", str(tmp_path / "ready"))
    watch.until(lambda: (tmp_path / "ready").exists())
    assert files(name) == {"1", "2", "3"}
    getattr(run, end)()
    with pytest.raises(RunCancelledError):
        run.result(timeout=watch.DEADLINE)
    watch.until(lambda: files(name) == {"3"})


DRIVER = """
import sys
from test_shared_memory import hold
from distributor import TorchDistributor
TorchDistributor(1, True, False, grace_period=1).run(hold, *sys.argv[1:])
"""


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_none(name: str, tmp_path: Path) -> None:
    SharedMemory(f"{name}3", create=True, size=8).close()
    ready = tmp_path / "ready"
    with programs.start(tmp_path, DRIVER, name, f"{name}3", ready) as driver:
        watch.until(ready.exists)
        driver.kill()
    watch.until(lambda: files(name) == {"3"})


def leave(name: str) -> None:
    """Leaves shared memory on purpose."""
    from multiprocessing import resource_tracker

    SharedMemory(f"{name}4", create=True, size=8).close()
    resource_tracker.unregister(f"/{name}4", "shared_memory")


def test_what_a_rank_leaves_on_purpose_stays(make_local: Make, name: str) -> None:
    make_local(1).run(leave, name)
    assert files(name) == {"4"}


def read(path: str, ready: str) -> None:
    """Maps a file, as a data set that somebody has put into memory."""
    import mmap

    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        Path(ready).touch()
        while mapped[0] == ord("d"):
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["", "folder/"])
def test_a_file_of_the_users_stays(make_local: Make, name: str, inside: str, tmp_path: Path) -> None:
    folder = SHM / f"{name}-data"
    path = (folder if inside else SHM) / f"{name}-tokens.bin"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"data")
    try:
        run = make_local(1, grace_period=1).submit(read, str(path), str(tmp_path / "ready"))
        watch.until(lambda: (tmp_path / "ready").exists())
        run.kill()
        run.wait(watch.DEADLINE)
        assert path.read_bytes() == b"data"
    finally:
        path.unlink()
        if inside:
            folder.rmdir()


def hold_under_another_name(name: str, ready: str) -> None:
    """Makes shared memory that only Python's resource tracker knows to be no data."""
    kept = SharedMemory(name, create=True, size=8)
    Path(ready).touch()
    while kept:
        time.sleep(0.05)


def test_pythons_tracker_gets_time_to_remove_what_it_knows(make_local: Make, name: str, tmp_path: Path) -> None:
    run = make_local(1, grace_period=1).submit(hold_under_another_name, f"{name}-named", str(tmp_path / "ready"))
    watch.until(lambda: (tmp_path / "ready").exists())
    assert files(name) == {"-named"}
    run.kill()
    run.wait(watch.DEADLINE)
    watch.until(lambda: files(name) == set())
