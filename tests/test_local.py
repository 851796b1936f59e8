"""What only local mode can show: many runs at once, several nodes on one machine, the driver's own end."""

from __future__ import annotations

import errno
import importlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import trainings
import watch
from driver import submit
from sessions import Make

from distributor import ResourceError, StartError, Status, TorchDistributor, TrainingError
from distributor.channel import control
from distributor.machine import processes
from distributor.machine.folders import PREFIX
from distributor.run.submission import Submission
from distributor.schedulers.hosting.host_node import HostedNode
from distributor.values.plan import AgentOrder


@pytest.mark.long
def test_ten_runs_at_the_same_time(make_local: Make) -> None:
    runs = [make_local(2).submit(trainings.all_reduce) for _ in range(10)]
    assert [run.results(timeout=300) for run in runs] == [[3.0, 3.0]] * 10
    watch.gone()


def test_a_failure_of_the_driver_itself_is_no_lost_node(
    make_local: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even if it ends the driver's nodes."""

    def converse(node: HostedNode, order: AgentOrder) -> None:
        assert node._line is not None
        control.send(node._line, vars(order))
        watch.until(lambda: run.status is Status.RUNNING)
        assert node._agent is not None
        node._agent.kill()
        watch.until(lambda: run.status is Status.STOPPING)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(HostedNode, "converse", converse)
    run = make_local(1).submit(trainings.wait_for, str(tmp_path / "never"))
    with pytest.raises(StartError, match="^this process has too many open files"):
        run.result(watch.DEADLINE)
    watch.gone(run.id)


def is_mapped() -> tuple[bool, str | None]:
    """Whether a tensor of 24 MiB goes back to the kernel as it is freed (mallinfo(3)); and what a child would see."""
    import ctypes

    import torch

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "free", "fast", "mapped", "bytes", *"abcde")]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Info
    before = libc.mallinfo2().mapped
    held = torch.ones(6 << 20)
    return libc.mallinfo2().mapped > before and held is not None, os.environ.get("GLIBC_TUNABLES")


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_ranks_on_cpus_keep_memory_for_their_next_step(make_local: Make, start_method: str) -> None:
    assert make_local(1, start_method=start_method).run(is_mapped) == (False, None)


@pytest.mark.long
def test_a_variable_leaves_memory_to_the_c_library(make_local: Make) -> None:
    env = {"DISTRIBUTOR_KEEP_MEMORY": "0"}
    assert make_local(1, env=env, start_method="spawn").run(is_mapped) == (True, None)


def fail_on_the_second_node(never: str) -> None:
    if os.environ["NODE_RANK"] == "1":
        raise ValueError("on the second node")
    trainings.wait_for(never)


@pytest.mark.slow
def test_a_failure_stops_other_nodes_through_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous store carries the word where the driver cannot: it neither orders nor ends anything here."""
    monkeypatch.setattr(Submission, "stop_ranks", lambda *_, **__: None)
    monkeypatch.setattr(Submission, "end", lambda *_: None)
    run = submit(fail_on_the_second_node, str(tmp_path / "never"))
    with pytest.raises(TrainingError, match="ValueError: on the second node"):
        run.result(timeout=watch.DEADLINE)
    watch.gone(run.id)


@pytest.mark.long
def test_a_node_that_does_not_reach_the_channel_is_no_late_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = HostedNode.start, []

    def without_channel(node: HostedNode, root: str, inherit: dict[str, Any], **options: Any) -> Any:
        started.append(root)
        return start(node, root, {k: v for k, v in inherit.items() if k != "channel" or len(started) == 1}, **options)

    assert submit(trainings.rank).results(watch.DEADLINE) == [0, 1]  # torch is imported by now
    monkeypatch.setattr(HostedNode, "start", without_channel)
    run = submit(trainings.wait_for, str(tmp_path / "go"), start_timeout=15.0)
    assert not run.wait(17)
    (tmp_path / "go").touch()
    assert run.results(timeout=watch.DEADLINE) == [0, 1]


@pytest.mark.long
def test_own_classes_can_be_saved_and_sent_to_spawned_workers(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_network.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    pass\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 3\n    def __getitem__(self, i):\n        return i * i\n"
        "def train(path):\n    torch.save(Net(1, 1), path)\n"
        "    loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context='spawn')\n"
        "    return [x.item() for x in loader]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own_network = importlib.import_module("own_network")
    assert make_local(1).run(own_network.train, str(tmp_path / "net.pt")) == [0, 1, 4]
    assert (tmp_path / "net.pt").exists()


def test_whatever_interrupts_run_ends_the_ranks(make_local: Make, tmp_path: Path) -> None:
    class Alarm(Exception):
        pass

    def ring(*_: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        with pytest.raises(Alarm):
            make_local(1, grace_period=1).run(trainings.wait_for, str(tmp_path / "never"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    watch.gone()


@pytest.mark.slow
def test_a_driver_may_end_while_its_run_goes(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom distributor import Status, TorchDistributor\n"
        "run = TorchDistributor(1, True, False).submit(time.sleep, 600)\n"
        "while run.status is not Status.RUNNING:\n    time.sleep(0.01)\nsys.exit(7)\n"
    )
    assert programs.run(tmp_path, code).returncode == 7
    watch.gone()


def test_a_strange_file_in_the_temporary_folder_does_no_harm(make_local: Make) -> None:
    trap = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        os.mkfifo(trap / "owner")
        assert make_local(1).submit(trainings.rank).results(timeout=watch.DEADLINE) == [0]
    finally:
        shutil.rmtree(trap, ignore_errors=True)


def test_a_python_without_pidfd_open_asks_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = processes.pidfd_open(child.pid)
    assert not select.select([descriptor], [], [], 0)[0]
    child.communicate(b"\n")
    assert select.select([descriptor], [], [], watch.DEADLINE)[0]
    os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        processes.pidfd_open(child.pid)


DRIVER = """
    import sys
    from distributor import TorchDistributor
    import trainings
    print("start", flush=True)
    TorchDistributor(2, local_mode=True, use_gpu=False, grace_period=1).run(trainings.wait_for, sys.argv[1])
"""


def start_driver(tmp_path: Path) -> subprocess.Popen[str]:
    """A driver process of its own, in a session of its own, whose ranks are waiting."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    driver = programs.start(tmp_path, DRIVER, tmp_path / "never", start_new_session=True, **streams)
    assert driver.stdout is not None
    waiting = 0
    while waiting < 2:
        line = driver.stdout.readline()
        assert line, "the driver ended"
        waiting += "waiting" in line
    return driver


def test_ctrl_c_ends_the_ranks_and_then_the_driver(tmp_path: Path) -> None:
    driver = start_driver(tmp_path)
    left = watch.below(driver.pid)
    driver.send_signal(signal.SIGINT)
    out, _ = driver.communicate(timeout=watch.DEADLINE)
    assert re.search(r"\[distributor\] run \w+: interrupted; ranks? 0.* at trainings\.py:\d+\n", out)
    assert out.endswith("KeyboardInterrupt\n")
    assert "_await" not in out  # the way through this package
    assert len(left) == 5  # agent, launcher, two ranks, warm process
    watch.until(lambda: not any(process.is_running() for process in left))


def fail_with_a_hook_of_its_own() -> None:
    sys.excepthook = lambda kind, error, frames: print("the hook was told of", error, file=sys.stderr)
    raise ValueError("no")


def test_output_of_the_users_excepthook_is_shown(make_local: Make, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match="ValueError: no"):
        make_local(1).run(fail_with_a_hook_of_its_own)
    assert re.search(r"^\[rank 0 \S+\] the hook was told of no$", capfd.readouterr().err, re.MULTILINE)


def fail_with_another_stderr(path: str) -> None:
    sys.stderr = open(path, "w")
    raise ValueError("no")


def test_another_stderr_gets_the_traceback_as_well(make_local: Make, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="ValueError: no"):
        make_local(1).run(fail_with_another_stderr, str(tmp_path / "errors"))
    assert "ValueError: no" in (tmp_path / "errors").read_text()


FAILING = """
    from distributor import TorchDistributor
    import trainings
    TorchDistributor(2, local_mode=True, use_gpu=False, keep_warm=0).run(trainings.fail_alike)
"""


@pytest.mark.slow
def test_a_script_whose_ranks_fail_ends_with_one_traceback_of_theirs(tmp_path: Path) -> None:
    done = programs.run(tmp_path, FAILING)
    errors = done.stderr.replace(socket.gethostname(), "HOST")
    assert done.returncode == 1
    assert errors.count("Traceback (most recent call last):") == 2  # the driver's own, and the ranks'
    assert errors.count("raise ValueError") == 1
    driver, ranks = errors.split("distributor.errors.TrainingError: ")
    assert [line.split(", ")[-1] for line in driver.splitlines() if line.startswith("  File")] == [
        "in <module>",
        "in run",
    ]
    assert ranks.startswith(
        "ranks 0-1 on HOST failed: ValueError: learning rate must be positive\n\nTraceback (most recent call last):\n"
    )


@pytest.mark.slow
def test_the_folder_of_a_driver_and_an_agent_that_are_killed_is_removed(tmp_path: Path) -> None:
    driver = start_driver(tmp_path)
    family = psutil.Process(driver.pid)
    (agent,) = watch.agents_of(driver.pid)
    (folder,) = [path for path in watch.folders() if any(str(path) in str(f.path) for f in agent.open_files())]
    for process in (family, agent):  # frozen first, so that neither can clean up after the other
        process.suspend()
    for process in (family, agent):
        process.kill()
    driver.wait()
    watch.until(lambda: not folder.exists())


def test_a_rank_starts_no_jvm(make_local: Make) -> None:
    pytest.importorskip("pyspark")

    def count() -> int:
        from pyspark.sql import SparkSession

        return int(SparkSession.builder.master("local[1]").getOrCreate().range(3).count())

    refused = "RuntimeError: a SparkSession cannot be created inside a rank: each rank would start a JVM of its own"
    with pytest.raises(TrainingError, match=f"^rank 0 on .* failed: {refused}"):
        make_local(1, preload=["pyspark.sql"]).run(count)


@pytest.mark.parametrize("timeout", [0.0, 0.3])
def test_a_start_that_takes_too_long_is_an_error(make_local: Make, timeout: float) -> None:
    """Importing torch takes longer."""
    for process in watch.warm_processes(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    doing = "starting a process on this machine|importing torch on 1 node|not up on 1 of 1 nodes"
    with pytest.raises(StartError, match=f"did not start within start_timeout=.*({doing})"):
        make_local(2, start_timeout=timeout).run(trainings.rank)
    watch.gone()


@pytest.mark.slow
def test_the_example_script_runs_as_the_readme_says(make_local: Make, capfd: pytest.CaptureFixture[str]) -> None:
    make_local(3).run(Path(__file__).parent.parent / "examples/digits_script.py", "--epochs", "3")
    assert "on 3 ranks" in capfd.readouterr().out


@pytest.mark.slow
def test_resources_of_each_rank(make_local: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.machine.processes.cpu_count", lambda: 8)
    run = make_local(2, cpus_per_process=3, memory_per_process="1m", max_processes_per_node=2)
    assert run.submit(trainings.environment, "OMP_NUM_THREADS").results() == [{"OMP_NUM_THREADS": "3"}] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("fake_gpus")
def test_several_gpus_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    run = TorchDistributor(2, local_mode=True, gpus_per_process=2).submit(trainings.environment, "CUDA_VISIBLE_DEVICES")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in run.results()] == ["4,6,5,7"] * 2  # cuda:LOCAL_RANK is a rank's own
    with pytest.raises(ResourceError, match="needs 6 GPUs, but this machine has 4 visible GPUs"):
        TorchDistributor(2, local_mode=True, gpus_per_process=3)


@pytest.mark.slow
def test_ranks_of_one_machine_talk_over_loopback(make_local: Make) -> None:
    names = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR")
    seen = make_local(2).submit(trainings.environment, *names).results()
    assert seen == [{"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}] * 2


def what_pyspark_says_without_grpc() -> str:
    sys.modules["grpc"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("pyspark.sql.connect.session")
    except ImportError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_pyspark_does_not_take_a_rank_for_its_doctests(make_local: Make) -> None:
    """Where its main module has neither file nor specification, PySpark ends the process, with exit code 0."""
    pytest.importorskip("pyspark", minversion="4.3")
    assert "grpc" in make_local(1, keep_warm=0).run(what_pyspark_says_without_grpc)


def end_with_workers() -> None:
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(1000), num_workers=2))  # type: ignore[arg-type]
    next(batches)
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_of_a_killed_rank_leave_no_folder(make_local: Make) -> None:
    before = set(Path(tempfile.gettempdir()).glob("pymp-*"))
    with pytest.raises(TrainingError, match="killed by SIGKILL"):
        make_local(1).run(end_with_workers)
    assert set(Path(tempfile.gettempdir()).glob("pymp-*")) <= before
