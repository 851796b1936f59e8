"""Warm processes: they make the next run start at once, and nothing else of it different."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import trainings
import watch
from sessions import Make
from watch import started_by

from distributor import RunCancelledError, Status, TorchDistributor, TrainingError
from distributor.values import environment, layout


@pytest.mark.long_on_executors
def test_a_run_after_the_first_is_forked_by_the_same_process(make: Make) -> None:
    first = set(make(4).submit(started_by).results())
    assert 0 not in first
    assert set(make(4).submit(started_by).results()) == first
    assert make(4, keep_warm=0).submit(started_by).results() == [0] * 4


def look() -> dict[str, Any]:
    """What a rank can see of where it was started, and what those before it could have left."""
    import gc
    import locale
    import logging
    import multiprocessing
    import re
    import resource
    import socket
    import threading
    import warnings

    import numpy
    import torch

    def target_of(name: str) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing
            return ""

    def kind_of(target: str) -> str:
        """Inode numbers and the run's own folder differ from run to run."""
        return target.partition(":")[0] if ":[" in target else re.sub("/distributor-[^/]*", "/FOLDER", target)

    mine = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", environment.NODE_ID)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    loaded = [name for name, module in sys.modules.items() if "polluting" in str(getattr(module, "__file__", ""))]
    return {
        "environ": {name: kind_of(value) for name, value in os.environ.items() if name not in mine},
        "cwd": os.getcwd(),
        "links": sorted({os.path.dirname(os.readlink(entry)) for entry in os.scandir() if entry.is_symlink()}),
        "umask": Path("/proc/self/status").read_text().split("Umask:")[1][:6],
        "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "alarm": signal.getitimer(signal.ITIMER_REAL),
        "descriptors": sorted({kind_of(target_of(name)) for name in os.listdir("/proc/self/fd")}),
        "locale": [locale.setlocale(getattr(locale, name)) for name in ("LC_CTYPE", "LC_NUMERIC", "LC_TIME")],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "nice": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "path": [
            entry.replace(os.environ["TORCHELASTIC_RUN_ID"], "RUN").rpartition("-")[0] or entry for entry in sys.path
        ],
        "argv": sys.argv,
        "modules": loaded,
        "mark": polluted_marks(),
        "main": multiprocessing.current_process().name,
        "threads": [thread.name for thread in threading.enumerate()],
        "torch": (torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()),
        "numpy": json.dumps(numpy.geterr()),
        "filters": len(warnings.filters),
        "log": (logging.getLogger().level, len(logging.getLogger().handlers)),
        "timeout": socket.getdefaulttimeout(),
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "hooks": (sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "children": [child.pid for child in psutil.Process().children()],
    }


def polluted_marks() -> list[str]:
    import builtins

    import torch

    return [name for name, holder in (("builtins", builtins), ("torch", torch)) if hasattr(holder, "polluted")]


def pollute(folder: str) -> None:
    """Leaves traces everywhere."""
    import atexit
    import builtins
    import gc
    import locale
    import logging
    import resource
    import socket
    import threading
    import warnings

    import numpy
    import torch

    os.environ["POLLUTED"] = "1"
    os.environ.pop("HOME", None)
    os.chdir(folder)
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    kept = [open(Path(folder, "kept"), "w"), socket.socket()]
    locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    os.nice(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    Path(folder, "polluting_module.py").write_text("x = 1\n")
    sys.path.insert(0, folder)
    __import__("polluting_module")
    sys.argv[:] = ["polluted"]
    builtins.polluted = torch.polluted = kept  # type: ignore[attr-defined]
    torch.set_num_threads(7)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    numpy.seterr(all="raise")
    warnings.simplefilter("error")
    logging.basicConfig(level=logging.DEBUG)
    socket.setdefaulttimeout(1)
    sys.setrecursionlimit(5000)
    sys.excepthook = lambda *_: None
    gc.disable()
    threading.Thread(target=lambda: None, daemon=True).start()
    atexit.register(print, "polluted")


def temporary(folder: str) -> str:
    import tempfile

    os.environ["TMPDIR"] = folder
    return tempfile.gettempdir()


def test_a_rank_may_choose_its_temporary_folder(make_local: Make, tmp_path: Path) -> None:
    assert make_local(1).run(temporary, str(tmp_path)) == str(tmp_path)


@pytest.mark.long_on_executors
@pytest.mark.slow
def test_nothing_of_a_run_is_seen_by_the_next(make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make(4).run(pollute, str(tmp_path))
    capfd.readouterr()
    warm = make(4).submit(look).results()
    assert "polluted" not in capfd.readouterr().out
    anew = make(4, keep_warm=0).submit(look).results()
    for ours, theirs in zip(by_node(warm), by_node(anew)):
        same(ours, theirs)


def by_node(looks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ranks saw, without the ranks: which executor becomes which node differs from run to run."""
    for seen in looks:
        for name in ("RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"):
            del seen["environ"][name]
        seen["cwd"] = re.sub(r"/distributor-[^/]*/", "/", seen["cwd"])  # on executors, each run has a folder of its own
    return sorted(looks, key=lambda seen: (seen["links"], seen["environ"]["LOCAL_RANK"]))


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Asserts that two ranks saw the same, name by name."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            same(value, other[name])
        else:
            assert (name, value) == (name, other[name])


@pytest.mark.long_on_executors
def test_random_numbers_are_of_each_rank_and_run(make: Make) -> None:
    def draw() -> tuple[float, ...]:
        import random

        import numpy
        import torch

        return random.random(), float(numpy.random.random()), torch.rand(1).item(), float(torch.initial_seed())

    drawn = [values for _ in range(2) for values in make(2).submit(draw).results()]
    for values in zip(*drawn):
        assert len(set(values)) == 4


@pytest.mark.slow
def test_changes_of_the_drivers_environment_take_effect(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_local(1).run(look)
    forked_by = make_local(1).run(started_by)
    monkeypatch.setenv("NEW_VARIABLE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    umask = os.umask(0o027)
    try:
        after, anew = (make_local(1, **options).run(look) for options in ({}, {"keep_warm": 0}))
    finally:
        os.umask(umask)
    same(after, anew)
    assert after["environ"]["NEW_VARIABLE"] == "1"
    assert after["cwd"] == str(tmp_path)
    assert after["umask"] != before["umask"]
    assert make_local(1).run(started_by) != forked_by


def test_changes_that_imports_ignore_take_no_new_process(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked_by = make_local(1).run(started_by)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "the next one")
    assert make_local(1).run(started_by) == forked_by
    assert make_local(1).run(os.getcwd) == str(tmp_path)


@pytest.mark.parametrize(
    "kind", ["function", *(pytest.param(kind, marks=pytest.mark.long_on_executors) for kind in ("script", "module"))]
)
def test_edits_between_runs_take_effect(
    make: Make, mode: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    distributor = make(1, working_dir=project)
    for word in ("first", "second, longer"):
        (project / "edited.py").write_text(f"WORD = {word!r}\ndef tell():\n    print(WORD)\n")
        (project / "main.py").write_text("import edited\nedited.tell()\n")
        if kind == "function":
            distributor.run(lambda: __import__("edited").tell())
        elif kind == "script":
            distributor.run(project / "main.py")
        else:
            distributor.run_module("main")
        assert capfd.readouterr().out.rstrip().endswith(word)


def test_edits_of_modules_that_the_driver_has_imported_take_effect(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here ranks import them from where they are; to executors, they travel as the driver has them."""
    module = tmp_path / "edited_training.py"
    module.write_text("def train():\n    return 'first'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    training = importlib.import_module("edited_training")
    assert make_local(1).run(training.train) == "first"
    module.write_text("def train():\n    return 'second, longer'\n")
    assert make_local(1).run(training.train) == "second, longer"


@pytest.mark.long_on_executors
@pytest.mark.slow
def test_a_warm_process_ends_after_keep_warm(make: Make) -> None:
    forked_by = make(1, keep_warm=0.3).run(started_by)
    watch.until(lambda: not psutil.pid_exists(forked_by))
    watch.until(lambda: not [folder for folder in warm_folders() if f" {forked_by}" in folder.name])
    again = make(1, keep_warm=0.3).run(started_by)
    assert again not in (0, forked_by)
    watch.until(lambda: not psutil.pid_exists(again))


def warm_folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{layout.PREFIX}warm-*"))


@pytest.mark.slow
def test_a_warm_process_stays_while_its_run_lasts(make_local: Make, tmp_path: Path) -> None:
    run = make_local(1, keep_warm=0.1).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: run.status is Status.RUNNING)
    (agent,) = [process for process in watch.processes(run.id) if watch.is_agent(process)]
    forked_by = agent.parent()
    assert forked_by is not None
    with pytest.raises(psutil.TimeoutExpired):
        forked_by.wait(1.0)
    (tmp_path / "go").touch()
    assert run.result(timeout=watch.DEADLINE) == 0
    forked_by.wait(watch.DEADLINE)


@pytest.mark.long_on_executors
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_warm_process_that_does_not_answer_is_replaced(make: Make, number: signal.Signals) -> None:
    forked_by = set(make(4).submit(started_by).results())
    for pid in forked_by:
        os.kill(pid, number)
    again = set(make(4).submit(started_by).results())
    assert not again & {0, *forked_by}
    watch.until(lambda: not any(psutil.pid_exists(pid) for pid in forked_by))


@pytest.mark.long
def test_a_warm_process_whose_guard_was_killed_is_replaced(make_local: Make) -> None:
    """Nobody would end what its agents leave behind when they are killed."""
    unguarded = psutil.Process(make_local(1, env={"GUARDED": "no"}).run(started_by))
    guard = unguarded.parent()
    assert guard is not None and watch.part(guard) == "guard"
    guard.kill()
    watch.until(lambda: unguarded.parent() != guard)
    assert make_local(1, env={"GUARDED": "no"}).run(started_by) not in (0, unguarded.pid)
    watch.until(lambda: not unguarded.is_running())


def test_the_end_of_a_warm_process_does_not_disturb_a_run(make: Make, tmp_path: Path) -> None:
    forked_by = make(1).run(started_by)
    run = make(1).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: run.status is Status.RUNNING)
    os.kill(forked_by, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert run.result(timeout=watch.DEADLINE) == 0
    watch.gone(run.id)


@pytest.mark.slow
def test_a_warm_process_ends_with_its_executor(sessions: Any) -> None:
    sessions.get("local-cluster[2,2,1024]")
    distributor = TorchDistributor(2, False, False)
    forked_by = distributor.submit(started_by).results()
    owner = psutil.Process(int(psutil.Process(forked_by[0]).cmdline()[7]))
    assert "CoarseGrainedExecutorBackend" in " ".join(owner.cmdline())
    folder = watch.folder_of(forked_by[0])
    owner.kill()
    watch.until(lambda: not psutil.pid_exists(forked_by[0]))
    watch.until(lambda: not folder.exists())
    assert distributor.run(trainings.all_reduce) == 3.0


DRIVER = """
import os, time
from distributor import TorchDistributor
from watch import started_by
print(TorchDistributor(1, True, False, logs="none").run(started_by), flush=True)
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["", pytest.param("os._exit(1)", marks=pytest.mark.long), "os.kill(os.getpid(), 9)", "time.sleep(600)"]
)
def test_a_warm_process_ends_with_its_driver(end: str, tmp_path: Path) -> None:
    with programs.start(tmp_path, DRIVER.format(end=end), stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        forked_by = int(driver.stdout.readline())
        folder = watch.folder_of(forked_by) if "sleep" in end else None
        if "sleep" in end:
            driver.send_signal(signal.SIGINT)
    watch.until(lambda: not psutil.pid_exists(forked_by))
    assert folder is None or not folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs a namespace of process IDs")
@pytest.mark.long
def test_the_first_process_of_a_container_leaves_no_warm_folder(tmp_path: Path) -> None:
    """The kernel kills the warm process with it."""
    script, folder = tmp_path / "driver.py", tmp_path / "tmp"
    folder.mkdir()
    script.write_text("""
import os, pathlib, tempfile
from distributor import TorchDistributor
TorchDistributor(1, True, False, logs="none").run(os.getpid)
print(os.getpid(), len(list(pathlib.Path(tempfile.gettempdir()).glob("distributor-warm-*"))))
""")
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, str(script)]
    env = {**os.environ, "TMPDIR": str(folder)}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=watch.DEADLINE)
    assert ended.stdout == "1 1\n", ended.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_an_upgraded_module_takes_a_new_process(make_local: Make, tmp_path: Path) -> None:
    """An upgraded package, say."""
    module = tmp_path / "upgraded.py"

    def version() -> tuple[int, str]:
        return started_by(), __import__("upgraded").VERSION

    seen = []
    for number in ("1", "22"):
        module.write_text(f"VERSION = {number!r}\n")
        seen.append(make_local(1, preload=["upgraded"], env={"PYTHONPATH": str(tmp_path)}).run(version))
    assert [version for _, version in seen] == ["1", "22"]
    assert seen[0][0] != seen[1][0]
    watch.until(lambda: not psutil.pid_exists(seen[0][0]))


def loaded(*names: str) -> list[bool]:
    return [name in sys.modules for name in names]


@pytest.mark.slow
def test_preloaded_modules_are_there_at_once(make_local: Make) -> None:
    assert make_local(1, preload=["sklearn.datasets"]).run(loaded, "sklearn.datasets", "torch") == [True, True]
    assert make_local(1).run(loaded, "sklearn.datasets", "torch") == [False, True]


def test_the_collector_is_off_while_a_rank_imports_what_optimizers_need(make_local: Make) -> None:
    def collections() -> int:
        import gc

        phases: list[str] = []
        gc.callbacks.append(lambda phase, about: phases.append(phase))
        importlib.import_module("torch._dynamo")
        assert gc.isenabled()
        return phases.count("start")

    assert make_local(1).run(collections) <= 2  # just before, and just after


@pytest.mark.slow
def test_ranks_do_not_finalize_what_they_have_not_made(make_local: Make, tmp_path: Path) -> None:
    tmp_path.joinpath("has_folder.py").write_text("import tempfile\nfolder = tempfile.TemporaryDirectory()\n")

    def exists() -> tuple[bool, str]:
        import has_folder  # type: ignore[import-not-found]

        own = tempfile.TemporaryDirectory()
        sys.modules["keeps"] = own  # type: ignore[assignment]  # until the rank ends
        return os.path.isdir(has_folder.folder.name), own.name

    distributor = make_local(1, preload=["has_folder"], env={"PYTHONPATH": str(tmp_path)})
    (first, own), (second, _) = distributor.run(exists), distributor.run(exists)
    assert (first, second, os.path.exists(own)) == (True, True, False)


@pytest.mark.long
@pytest.mark.parametrize("entry", [pytest.param("{}", marks=pytest.mark.long, id="absolute"), "lib"])
def test_torch_may_come_from_pythonpath(
    entry: str, make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``pip install --target lib``: this Python's own folders have no torch."""
    import torch

    venv.create(tmp_path / "bare", symlinks=True)
    (tmp_path / "lib").symlink_to(Path(torch.__file__).parents[1])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.setenv("PYTHONPATH", entry.format(tmp_path / "lib"))
    monkeypatch.chdir(tmp_path)
    distributor = make_local(1, preload=["sklearn.datasets"])
    assert distributor.run(started_by) == distributor.run(started_by) != 0
    assert distributor.run(loaded, "sklearn.datasets", "torch") == [True, True]


@pytest.mark.long
@pytest.mark.spark
def test_entries_of_pythonpath_are_relative_to_the_executors_folder(two_executors: Any) -> None:
    """As with ``--archives lib.zip#lib`` and ``PYTHONPATH=lib``."""

    def unpack(_: Any) -> list[Any]:
        os.makedirs("lib", exist_ok=True)
        open("lib/found_by_path.py", "w").close()
        return []

    two_executors.sparkContext.parallelize(range(4), 4).barrier().mapPartitions(unpack).collect()
    distributor = TorchDistributor(4, False, False, preload=["found_by_path"], env={"PYTHONPATH": "lib"})
    assert distributor.submit(loaded, "found_by_path", "torch").results() == [[True, True]] * 4


@pytest.mark.long_on_executors
@pytest.mark.long
def test_a_module_that_cannot_be_preloaded_is_warned_of(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert make(2, preload=["no_such_module"]).run(trainings.all_reduce) == 3.0
    assert "cannot preload 'no_such_module' (ModuleNotFoundError: No module named 'no_such_module')" in caplog.text


@pytest.mark.long
def test_a_warm_process_with_threads_is_not_forked(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threading_module.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True, name='its-own').start()\n"
    )
    distributor = make_local(1, preload=["threading_module"], env={"PYTHONPATH": str(tmp_path)})
    assert distributor.run(started_by) == 0
    assert "preload=['threading_module'] starts threads (its-own), which do not survive a fork" in caplog.text
    unfit = watch.warm_processes(os.getpid())
    assert distributor.run(started_by) == 0
    assert watch.warm_processes(os.getpid()) == unfit  # it knows, and need not import again


@pytest.mark.slow
def test_a_warm_process_that_has_used_a_gpu_is_not_forked(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a module does that counts devices when it is imported: torch then refuses them to forks."""
    (tmp_path / "counting_module.py").write_text(
        "import os, torch\nimporter = os.getpid()\ntorch.cuda._is_in_bad_fork = lambda: os.getpid() != importer\n"
    )
    assert make_local(1, preload=["counting_module"], env={"PYTHONPATH": str(tmp_path)}).run(started_by) == 0
    assert "preload=['counting_module'] uses a GPU, so forked ranks could not use it" in caplog.text


@pytest.mark.slow
@pytest.mark.long_on_executors
def test_a_run_is_cancelled_while_a_warm_process_imports(make: Make, tmp_path: Path) -> None:
    go, trained = tmp_path / "go", tmp_path / "trained"
    (tmp_path / "slow_module.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    )
    distributor = make(1, preload=["slow_module"], env={"PYTHONPATH": str(tmp_path)}, grace_period=1)
    before = watch.warm_processes()
    run = distributor.submit(trained.touch)
    watch.until(lambda: len(watch.warm_processes()) > len(before))
    watch.until(lambda: run.snapshot().detail == "importing slow_module on 1 node")
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(timeout=watch.DEADLINE)
    go.touch()
    watch.until(lambda: not [folder for folder in watch.folders() if run.id in folder.name])
    assert distributor.run(started_by) in {process.pid for process in watch.warm_processes()}
    watch.gone(run.id)
    assert not trained.exists()


@pytest.mark.slow
def test_keep_warm_may_be_a_month(make_local: Make) -> None:
    month = 30 * 24 * 3600.0
    assert make_local(1, keep_warm=month).run(started_by) == make_local(1, keep_warm=month).run(started_by) != 0


@pytest.mark.long
def test_at_most_three_warm_processes_stay(make_local: Make) -> None:
    folder_by_pid = {}
    for index in range(5):
        pid = make_local(1, env={"SETTING": str(index)}).run(started_by)
        folder_by_pid[pid] = watch.folder_of(pid)
    assert len(folder_by_pid) == 5

    def left() -> set[int]:
        """Other tests have some in temporary folders of their own."""
        return {process.pid for process in watch.warm_processes(os.getpid(), tempfile.gettempdir())}

    watch.until(lambda: len(left()) <= 3)
    assert pid in left()
    for gone in folder_by_pid.keys() - left():
        watch.until(lambda gone=gone: not folder_by_pid[gone].exists())


def test_a_warm_process_serves_no_client_without_the_token(make_local: Make) -> None:
    forked_by = make_local(1).run(started_by)
    folder = watch.folder_of(forked_by)
    assert folder.stat().st_mode & 0o777 == 0o700
    for shown in (b"", b"x" * 32, b"x" * 31):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(folder / "socket"))
            if shown:
                stranger.sendall(shown)
                stranger.settimeout(watch.DEADLINE)
                assert stranger.recv(1) == b""
    assert make_local(1).run(started_by) == forked_by


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_warm_process_serves_no_other_user(make_local: Make) -> None:
    forked_by = make_local(1).run(started_by)
    folder = watch.folder_of(forked_by)
    token = (folder / "token").read_bytes()

    def ask_as_nobody() -> int:
        child = os.fork()
        if child == 0:
            code = 3
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(str(folder / "socket"))
                    stranger.sendall(token)
                    code = 0 if stranger.recv(1) == b"" else 1
            except PermissionError:
                code = 2
            except ConnectionError:
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert ask_as_nobody() == 2  # the folder
    folder.chmod(0o755)
    (folder / "socket").chmod(0o777)
    try:
        assert ask_as_nobody() == 0  # who it is
    finally:
        folder.chmod(0o700)
    assert make_local(1).run(started_by) == forked_by


@pytest.mark.slow
def test_a_folder_that_others_could_write_to_is_not_used(make_local: Make) -> None:
    forked_by = make_local(1).run(started_by)
    folder = watch.folder_of(forked_by)
    folder.chmod(0o770)
    try:
        assert make_local(1).run(started_by) == 0
    finally:
        folder.chmod(0o700)
    assert make_local(1).run(started_by) == forked_by


@pytest.mark.slow
def test_a_long_temporary_path_is_no_hindrance(tmp_path: Path) -> None:
    """Those of a cluster's containers are longer than the path of a socket may be."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    done = programs.run(tmp_path, DRIVER.format(end=""), env={"TMPDIR": str(long)})
    assert int(done.stdout) > 1
    watch.until(lambda: not list(long.iterdir()))


@pytest.fixture
def spawned(make: Make) -> Iterator[Make]:
    return lambda num_processes=2, **options: make(num_processes, start_method="spawn", **options)


@pytest.mark.long_on_executors
@pytest.mark.long
def test_spawned_ranks_run_functions_and_scripts(
    spawned: Make, mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert spawned(2).submit(trainings.all_reduce).results(timeout=2 * watch.DEADLINE) == [3.0, 3.0]
    assert spawned(2).submit(loaded, "torch").results() == [[False], [False]]
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:], __name__)\n")
    spawned(2).run(script, "--lr", "0.1")
    assert "rank 1 ['--lr', '0.1'] __main__" in capfd.readouterr().out


@pytest.mark.long_on_executors
@pytest.mark.parametrize(
    ("how", "text"),
    [
        pytest.param("raise", "ValueError: learning rate", marks=pytest.mark.long_on_executors),
        ("SIGKILL", "killed by SIGKILL"),
    ],
)
@pytest.mark.long
def test_spawned_ranks_fail_as_forked_ones_do(spawned: Make, how: str, text: str) -> None:
    run = spawned(2, grace_period=1).submit(trainings.fail_on_rank_1, how)
    with pytest.raises(TrainingError, match=f"^rank 1 on .* failed: {text}"):
        run.result(timeout=2 * watch.DEADLINE)
    watch.gone(run.id)


@pytest.mark.long
def test_spawned_ranks_see_what_forked_ones_see(make_local: Make) -> None:
    forked, anew = make_local(1).run(look), make_local(1, start_method="spawn").run(look)
    same(forked, anew)
