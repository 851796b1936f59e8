"""Drivers in odd places: no room for threads, a strange temporary folder, the package in a zip."""

from __future__ import annotations

import io
import os
import shutil
import sys
import zipfile
from pathlib import Path

import programs
import pytest
import trainings
from sessions import Make, Sessions

import distributor
from distributor import StartError, TorchDistributor
from distributor.shipping.package import package_zip

NO_THREADS = """
    import resource, sys, threading
    import trainings
    from distributor import StartError, Status, TorchDistributor
    local = TorchDistributor(1, True, False, progress=False)
    assert local.run(trainings.rank) == 0
    threading.stack_size(256 << 20)  # no room for another thread's stack
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    try:
        run = local.submit(trainings.rank)
        run.result(60)
    except StartError as error:
        print(error)
"""


@pytest.mark.long
def test_without_further_threads_a_run_cannot_start(tmp_path: Path) -> None:
    ended = programs.run(tmp_path, NO_THREADS)
    assert ended.stdout.startswith("no further thread can be started: end other threads and processes"), ended.stderr
    assert ended.stderr == ""


READ_ONLY_SHM = """
    import ctypes, subprocess, sys
    assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", "/dev/shm"], check=True)

    def train():
        from distributor import runtime
        state = {"step": 0}
        runtime.load_checkpoint(state)
        if runtime.attempt() == 0:
            runtime.save_checkpoint({"step": 3}, 3, wait=True)
            sys.exit(1)
        return state["step"]

    from distributor import Checkpoints, TorchDistributor
    kept = Checkpoints(sys.argv[1], memory=True, replicate=len(sys.argv) > 2)
    options = {"max_restarts": 1, "restart_on": "any", "keep_warm": 0, "progress": False}
    print(TorchDistributor(1, True, False, checkpoints=kept, **options).run(train))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("more", [(), pytest.param(("replicate",), marks=pytest.mark.long)], ids=["", "replicate"])
@pytest.mark.long
def test_states_that_shared_memory_cannot_take_are_on_disk(more: tuple[str, ...], tmp_path: Path) -> None:
    ended = programs.run(tmp_path, READ_ONLY_SHM, tmp_path / "runs", *more)
    assert ended.stdout == "3\n", ended.stderr
    assert ended.stderr.count("so nothing is kept in memory: [Errno 30] Read-only file system: '/dev/shm/") == 1


@pytest.mark.long
def test_a_run_in_a_temporary_folder_whose_name_is_not_utf8(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/t\xff")
    os.mkdir(folder, 0o1777)
    monkeypatch.setattr("tempfile.tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    for keep_warm in (600.0, 0.0):
        assert make_local(2, keep_warm=keep_warm).run(trainings.all_reduce) == 3.0
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    make_local(1, log_dir=os.path.join(folder, "logs")).run(script)
    (kept,) = Path(folder).glob("logs/*/rank-0.stdout")
    assert kept.read_text() == "trained\n"
    shutil.rmtree(folder)  # so that its warm process ends


@pytest.mark.parametrize("inside", ["/lib", pytest.param("", marks=pytest.mark.long)])
@pytest.mark.long
def test_the_package_works_from_a_zip(inside: str, tmp_path: Path) -> None:
    """Ranks on this machine, and what would be sent to executors."""
    package = Path(distributor.__file__).parent
    with zipfile.ZipFile(tmp_path / "dist.zip", "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, f"{inside}/distributor/{path.relative_to(package)}".lstrip("/"))
    code = (
        "import io, zipfile, trainings, distributor\n"
        "from distributor.shipping.package import package_zip\n"
        "print(distributor.__file__)\n"
        "print(len(zipfile.ZipFile(io.BytesIO(package_zip())).namelist()))\n"
        "for keep_warm in (600, 0):\n"
        "    print(distributor.TorchDistributor(2, True, False, keep_warm=keep_warm).run(trainings.all_reduce))\n"
    )
    installed = [path for path in sys.path if path and Path(path) != package.parent]
    path = os.pathsep.join([f"{tmp_path}/dist.zip{inside}", *installed])
    ended = programs.run(tmp_path, code, env={"PYTHONPATH": path}, cwd=tmp_path)
    where, shipped, *values = ended.stdout.splitlines() or [ended.stderr] * 4
    assert where == f"{tmp_path}/dist.zip{inside}/distributor/__init__.py"
    assert int(shipped) == len(zipfile.ZipFile(io.BytesIO(package_zip())).namelist())
    assert values == ["3.0", "3.0"], ended.stderr


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("reached", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_missing_temporary_folder_of_an_executor_is_named(
    sessions: Sessions, reached: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    sessions.get("local-cluster[1,1,1024]", **{"spark.executorEnv.TMPDIR": str(folder)})
    one = TorchDistributor(1, False, False)
    assert one.run(trainings.rank) == 0  # from now on, Python takes the same folder in this worker
    shutil.rmtree(folder)
    if not reached:
        request.getfixturevalue("unreachable")
    text = rf"the temporary folder on .* cannot be used \(No such file or directory in {folder}\): make it usable there"
    with pytest.raises(StartError, match=text):
        one.run(trainings.rank)
    folder.mkdir()
    assert one.run(trainings.rank) == 0
