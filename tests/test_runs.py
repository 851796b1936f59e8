"""What holds for every run, wherever it goes: on this machine, as tasks of one JVM, on two executors."""

from __future__ import annotations

import functools
import importlib
import io
import os
import re
import signal
import sys
import textwrap
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import trainings
import watch
from sessions import LOCAL, Make

from distributor import ResultError, RunCancelledError, Status, TrainingError

SLOW = pytest.mark.long_on_executors


def nodes_of(mode: str) -> int:
    """How many nodes four ranks get."""
    return 2 if mode.startswith("local-cluster") else 1


def test_every_rank_takes_part_in_a_collective(make: Make) -> None:
    run = make(4).submit(trainings.all_reduce)
    assert run.results() == [10.0] * 4
    assert run.status is Status.SUCCEEDED
    assert run.result() == 10.0


def rank0_returns_last(folder: str) -> int:
    """Rank 0 returns only when all the others have."""
    if trainings.rank() == 0:
        while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]) - 1:
            time.sleep(0.01)
    else:
        Path(folder, str(trainings.rank())).touch()
    return trainings.rank()


def test_run_returns_the_value_of_rank_0_whoever_finishes_last(make: Make, tmp_path: Path) -> None:
    assert make(3).run(rank0_returns_last, str(tmp_path)) == 0


def test_a_rank_knows_where_it_is(make: Make, mode: str) -> None:
    nodes = nodes_of(mode)
    per_node = 4 // nodes
    assert make(4).submit(trainings.where).results() == [
        (r, 4, r % per_node, per_node, r // per_node, 0) for r in range(4)
    ]


def test_rank_0_goes_first(make: Make, tmp_path: Path) -> None:
    first, *others = make(4).submit(trainings.take_turns, str(tmp_path), "rank0_first").results()
    assert first == []
    assert all("node-0-rank-0" in before for before in others)


def test_local_rank_0_of_each_node_goes_first(make: Make, mode: str, tmp_path: Path) -> None:
    seen = make(4).submit(trainings.take_turns, str(tmp_path), "local_rank0_first").results()
    leaders = {f"node-{node}-rank-0" for node in range(nodes_of(mode))}
    for rank, before in enumerate(seen):
        is_leader = rank % (4 // nodes_of(mode)) == 0
        assert set(before) < leaders if is_leader else leaders <= set(before)


def take_turns_without_cpus(folder: str, name: str) -> list[str]:
    """Enters a block of ``runtime``, in a group that serves no CPU tensors: NCCL's, after ``init_process_group()``."""
    import torch.distributed as dist

    from distributor import runtime

    class OfGpus(dist.ProcessGroup):
        def getBackendName(self) -> str:
            return "of_gpus"

        def _refuse(self, *_: Any) -> Any:
            raise RuntimeError("No backend type associated with device type cpu")

        allreduce = broadcast = barrier = allgather = _refuse

    def make(store: Any, rank: int, size: int, timeout: Any) -> OfGpus:
        return OfGpus(rank, size)

    dist.Backend.register_backend("of_gpus", make, devices=["cuda"])
    dist.init_process_group("of_gpus")
    with getattr(runtime, name)():
        before = sorted(os.listdir(folder))
        Path(folder, f"node-{runtime.node_rank()}-rank-{runtime.local_rank()}").touch()
    return before


@pytest.mark.parametrize("name", ["rank0_first", "local_rank0_first"])
def test_rank0_first_waits_with_a_group_for_gpus_only(make_local: Make, tmp_path: Path, name: str) -> None:
    first, second = make_local(2).submit(take_turns_without_cpus, str(tmp_path), name).results()
    assert (first, second) == ([], ["node-0-rank-0"])


@pytest.mark.parametrize("name", ["rank0_first", "local_rank0_first"])
@pytest.mark.long_on_executors
def test_if_the_first_rank_fails_no_other_enters_the_block(make: Make, tmp_path: Path, name: str) -> None:
    with pytest.raises(TrainingError, match="rank 0 .*Diverged") as raised:
        make(3).run(trainings.take_turns, str(tmp_path), name, fails=True)
    for failure in raised.value.failures[1:]:
        told = f"RuntimeError: {name}: "
        known = "rank 0, which went first, has failed", "the connection to the other ranks has broken"
        assert failure.message.startswith(tuple(told + text for text in known)), "the store ends with rank 0"
    assert not [file for file in os.listdir(tmp_path) if not file.endswith("-rank-0")]


def fail_first_of_two() -> None:
    """Rank 0 fails in a block that the other rank never reaches."""
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    if trainings.rank() == 1:
        time.sleep(600)
    with runtime.rank0_first():
        raise trainings.Diverged(1)


def test_a_rank_that_fails_first_waits_for_no_other(make_local: Make) -> None:
    with pytest.raises(TrainingError, match="rank 0 .*Diverged"):
        make_local(2, grace_period=0).submit(fail_first_of_two).result(watch.DEADLINE)


def test_a_rank_that_returns_stays_until_others_have_connected(make: Make, tmp_path: Path) -> None:
    """Those may still be on their way out of ``init_process_group``, which its end would make fail."""
    assert make(3).submit(trainings.outlive, str(tmp_path / "returned")).results() == [True] * 3


def test_the_rank_contract_is_torchruns(make: Make, mode: str) -> None:
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE "
        "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE "
        "MASTER_ADDR MASTER_PORT OMP_NUM_THREADS CUDA_VISIBLE_DEVICES"
    ).split()
    run = make(4).submit(trainings.environment, *names)
    ranks = run.results()
    per_node = 4 // nodes_of(mode)
    for rank, env in enumerate(ranks):
        assert env["RANK"] == env["ROLE_RANK"] == str(rank)
        assert env["LOCAL_RANK"] == str(rank % per_node)
        assert env["NODE_RANK"] == env["GROUP_RANK"] == str(rank // per_node)
        assert env["LOCAL_WORLD_SIZE"] == str(per_node)
        assert env["WORLD_SIZE"] == env["ROLE_WORLD_SIZE"] == "4"
        assert env["GROUP_WORLD_SIZE"] == str(nodes_of(mode))
        assert env["TORCHELASTIC_RUN_ID"] == run.id
        assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert env["OMP_NUM_THREADS"] == "1"
        assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in ranks}) == 1
    assert run.placement is not None
    assert [list(node.ranks) for node in run.placement.nodes] == [
        list(range(first, first + per_node)) for first in range(0, 4, per_node)
    ]


def record_an_error() -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main() -> None:
        raise ValueError("learning rate")

    try:
        main()
    except ValueError:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"]) as file:
            raise RuntimeError(file.read()) from None


@pytest.mark.long
def test_torchs_record_writes_its_file(make_local: Make) -> None:
    with pytest.raises(TrainingError, match='RuntimeError: .*"ValueError: learning rate"'):
        make_local(1).run(record_an_error)


def signals_that_torch_handles() -> tuple[str, set[str]]:
    """Returns the variable, and the signals for which torch's elastic agent would set handlers by it in this rank."""
    import signal
    from types import SimpleNamespace

    from torch.distributed.elastic.multiprocessing import api

    api.PContext.start(SimpleNamespace(_start=lambda: None, _tail_logs=[]))  # starts nothing
    handled = [number for number in signal.Signals if signal.getsignal(number) is api._terminate_process_handler]
    return os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"], {number.name for number in handled}


@pytest.mark.long
def test_torchs_elastic_agent_handles_the_signals_of_its_variable(make_local: Make) -> None:
    from torch.distributed.launcher.api import LaunchConfig

    variable, handled = make_local(1).run(signals_that_torch_handles)
    assert variable == LaunchConfig(1, 1, 1).signals_to_handle  # torchrun's default
    assert handled == {*variable.split(",")}


@pytest.mark.long_on_executors
def test_variables_that_ask_for_more_than_cpus_have_are_warned_of(
    make: Make, local: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for by the run's own variables, and by the driver's, which only ranks on this machine inherit."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    make(1, env={"ACCELERATE_USE_DEEPSPEED": "true"}).run(int)
    assert "ACCELERATE_USE_DEEPSPEED asks for DeepSpeed, but with use_gpu=False" in caplog.text
    assert ("ACCELERATE_USE_FSDP asks for FSDP, for which Accelerate" in caplog.text) == local


@pytest.mark.long_on_executors
def test_callables_of_every_kind_can_be_trained(make: Make) -> None:
    offset = 5

    class Trainer:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        def fit(self, x: int) -> int:
            return self.factor * x

        def __call__(self, x: int) -> int:
            return self.factor + x

    one = make(1)
    assert one.run(lambda x: x + offset, 1) == 6
    assert one.run(functools.partial(pow, 2), 5) == 32
    assert one.run(Trainer(3).fit, x=4) == 12
    assert one.run(Trainer(3), 4) == 7


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module beside the user's notebook, with a helper of its own; executors have no copy."""
    (tmp_path / "own_helper.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "own_training.py").write_text(
        textwrap.dedent("""
        import own_helper

        class Weights:
            def __init__(self, value):
                self.value = value

        def train(x):
            return Weights(own_helper.double(x))
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("own_training")


@pytest.mark.slow
def test_functions_of_own_modules_travel_by_value(make: Make, own_module: ModuleType) -> None:
    weights = make(1).run(own_module.train, 21)
    assert weights.value == 42
    assert type(weights) is own_module.Weights


def test_a_script_gets_its_arguments_and_runs_as_main(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:], __file__.endswith('train.py'))\n")
    assert make(2).run(str(script), "--lr", "0.1") is None
    out = capfd.readouterr().out
    for rank in range(2):
        assert f"[rank {rank} " in out
    assert out.count("__main__ ['--lr', '0.1'] True") == 2


def test_a_script_that_raises_is_a_training_error(make: Make, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('raise ValueError("x")\n')
    with pytest.raises(TrainingError, match="ValueError: x") as caught:
        make(2).run(script)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.exit_code == 1
    assert caught.value.traceback.splitlines()[1].startswith(f'  File "{script}", line 1')  # wherever its copy was
    assert 'raise ValueError("x")' in caught.value.traceback
    assert str(caught.value).count("Traceback") == 1


@pytest.mark.long_on_executors
def test_a_script_from_a_pipe_is_read_on_the_driver(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """A shell passes such a path for ``<(...)``. Ranks cannot open it."""
    receiver, sender = os.pipe()
    with open(sender, "w") as file:
        file.write('import sys\nimport torch.distributed as dist\n\nprint("arguments", sys.argv[1:])\n')
        file.write('dist.init_process_group("gloo")\ndist.barrier()  # both have printed\nraise ValueError("x")\n')
    path = f"/dev/fd/{receiver}"
    try:
        with pytest.raises(TrainingError, match="ValueError: x") as caught:
            make(2).run(path, "--lr", "0.1")
    finally:
        os.close(receiver)
    assert capfd.readouterr().out.count("arguments ['--lr', '0.1']") == 2
    lines = caught.value.traceback.splitlines()
    assert lines[1:3] == [f'  File "{path}", line 7, in <module>', '    raise ValueError("x")']


@pytest.mark.long_on_executors
def test_a_script_that_demands_a_gpu_is_advised(make: Make, tmp_path: Path) -> None:
    line = "torch.nn.Linear(2, 1).cuda()"
    (tmp_path / "train.py").write_text(f"import torch\n\n{line}\n")
    with pytest.raises(TrainingError) as caught:
        make(1).run(tmp_path / "train.py")
    assert line in str(caught.value)  # of its traceback
    assert "The code asks for a GPU, but with use_gpu=False ranks see none: pass use_gpu=True" in str(caught.value)


@pytest.mark.long_on_executors
def test_a_script_that_exits_with_a_code_is_a_training_error(make: Make, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('before', flush=True)\nsys.exit(3)\n")
    with pytest.raises(TrainingError, match="exited with code 3") as caught:
        make(1).run(script)
    assert caught.value.exit_code == 3
    assert "before" in caught.value.log_tail


def test_a_project_folder_is_current_directory_and_on_the_path(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "project" / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model.py").write_text("NAME = 'model of pkg'\n")
    (package / "train.py").write_text(
        "import sys\nfrom pkg import model\nprint(model.NAME, open('data.txt').read(), sys.argv[1:])\n"
    )
    (tmp_path / "project" / "data.txt").write_text("some data")
    (tmp_path / "project" / "main.py").write_text("from pkg.model import NAME\nprint('script sees', NAME)\n")
    here = make(1, working_dir=tmp_path / "project")
    here.run_module("pkg.train", "--epochs", "2")
    here.run(tmp_path / "project" / "main.py")
    assert here.run(lambda: importlib.import_module("pkg.model").NAME) == "model of pkg"
    out = capfd.readouterr().out
    assert "model of pkg some data ['--epochs', '2']" in out
    assert "script sees model of pkg" in out


@pytest.mark.long_on_executors
def test_frames_of_a_project_folder_are_the_drivers(make: Make, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def fail():\n    raise ValueError('x')\n")
    (tmp_path / "train.py").write_text("import helper\n\nhelper.fail()\n")
    with pytest.raises(TrainingError) as caught:
        make(1, working_dir=tmp_path).run(tmp_path / "train.py")
    frames = [line.partition(", in ")[0] for line in caught.value.traceback.splitlines() if line.startswith("  File")]
    assert frames == [f'  File "{tmp_path}/train.py", line 3', f'  File "{tmp_path}/helper.py", line 2']


def test_files_written_into_a_copied_folder_are_warned_of(
    make: Make, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project, go = tmp_path / "project", tmp_path / "go"
    project.mkdir()
    (project / "train.py").write_text(
        "import sys, time\nfrom pathlib import Path\n\nPath('checkpoint.pt').touch()\n"
        "while not Path(sys.argv[1]).exists():\n    time.sleep(0.01)\n"
    )
    warning = "removes new files of its ranks when the run ends, such as 'checkpoint.pt' (written by rank 0)"
    run = make(1, working_dir=project).submit_module("train", str(go))
    if mode != LOCAL:
        watch.until(lambda: warning in caplog.text)
    go.touch()
    run.result(watch.DEADLINE)
    assert (project / "checkpoint.pt").exists() == (mode == LOCAL)
    assert (warning in caplog.text) == (mode != LOCAL)


def test_a_module_beside_the_script_has_to_be_shipped(make: Make, mode: str, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("print('helped')\n")
    script = tmp_path / "train.py"
    script.write_text("import helper\n")
    if mode == LOCAL:  # it is there
        make(1).run(script)
        return
    with pytest.raises(TrainingError, match="ModuleNotFoundError: No module named 'helper'\n") as caught:
        make(1).run(script)
    assert f"helper is on the driver, in {tmp_path}. To ship it" in str(caught.value)
    make(1, working_dir=tmp_path).run(script)


def test_a_module_that_executors_lack_has_no_frames_of_the_package(make: Make, mode: str) -> None:
    if mode == LOCAL:
        pytest.skip("refused before it starts: test_configuration.py")
    with pytest.raises(TrainingError) as caught:
        make(1).run_module("no_such_package.train")
    assert caught.value.traceback == "ModuleNotFoundError: No module named 'no_such_package.train'"


@pytest.mark.parametrize(
    ("how", "text", "exit_code", "signal_name"),
    [
        ("raise", "ValueError: learning rate must be positive", 1, None),
        pytest.param("diverge", "Diverged: 17", 1, None, marks=SLOW),
        pytest.param("exit", "exited with code 3", 3, None, marks=SLOW),
        pytest.param("sys.exit", "exited with code 3", 3, None, marks=SLOW),
        ("SIGKILL", "killed by SIGKILL", None, "SIGKILL"),
        pytest.param("SIGSEGV", "killed by SIGSEGV", None, "SIGSEGV", marks=SLOW),
    ],
)
def test_a_failing_rank_ends_the_run_at_once(
    make: Make, how: str, text: str, exit_code: int | None, signal_name: str | None
) -> None:
    run = make(2).submit(trainings.fail_on_rank_1, how)
    with pytest.raises(TrainingError) as caught:
        run.result(watch.DEADLINE)
    watch.gone(run.id)
    error = caught.value
    assert str(error).startswith(f"rank 1 on {error.host} failed: ")
    assert text in str(error).splitlines()[0]
    assert (error.rank, error.exit_code, error.signal) == (1, exit_code, signal_name)
    assert error.local_rank in (0, 1)
    assert "java" not in str(error).lower()
    assert run.status is Status.FAILED
    if how == "raise":
        assert isinstance(error.__cause__, ValueError)
        assert "in fail_on_rank_1" in error.traceback
        assert error.traceback in str(error) + "\n"
    if how == "diverge":
        assert type(error.__cause__) is trainings.Diverged
        assert error.__cause__.step == 17


def test_equal_failures_are_reported_once(make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the exception, and not by live lines as well; the files have what each rank wrote."""
    with pytest.raises(TrainingError) as caught:
        make(2, log_dir=tmp_path).run(trainings.fail_alike)
    text = str(caught.value)
    assert re.match(r"ranks 0-1 on \S+ failed: ValueError: learning rate must be positive\n\nTraceback", text)
    assert text.count("Traceback") == 1
    assert [failure.traceback for failure in caught.value.failures] == [caught.value.traceback] * 2
    err = capfd.readouterr().err
    assert err.count("] careful\n") == 2
    assert "Traceback" not in err
    for rank in range(2):
        (path,) = tmp_path.glob(f"*/rank-{rank}.stderr")
        assert path.read_text() == f"careful\n{caught.value.traceback}\n"


def leave_children(ready: str) -> None:
    """Starts children in sessions of their own that would outlive everything, then fails on rank 1 or waits.

    One has an environment of its own, so that nothing in it tells whose it is; its pid is left in a file.
    """
    import subprocess

    subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    unmarked = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={})
    Path(ready, str(trainings.rank())).write_text(str(unmarked.pid))
    while len(os.listdir(ready)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if trainings.rank() == 1:
        raise ValueError("after starting a child")
    time.sleep(600)


def test_children_of_ranks_do_not_outlive_the_run(make: Make, tmp_path: Path) -> None:
    run = make(2, grace_period=1).submit(leave_children, str(tmp_path))
    with pytest.raises(TrainingError, match="after starting a child"):
        run.result()
    watch.gone(run.id)
    unmarked = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    watch.until(lambda: not any(psutil.pid_exists(pid) for pid in unmarked))


def save_on_sigterm(saved: str, ready: str) -> None:
    """Uses the grace: writes a file when told to stop."""

    def save(*_: Any) -> None:
        Path(saved, str(trainings.rank())).write_text("saved")
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, save)
    Path(ready, str(trainings.rank())).touch()
    while True:
        time.sleep(0.05)


def test_ranks_may_save_within_the_grace(make: Make, tmp_path: Path) -> None:
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    saved.mkdir()
    ready.mkdir()
    run = make(2).submit(save_on_sigterm, str(saved), str(ready))
    watch.until(lambda: len(os.listdir(ready)) == 2)
    run.cancel()
    with pytest.raises(RunCancelledError, match=run.id):
        run.result(timeout=watch.DEADLINE)
    assert run.status is Status.CANCELLED
    assert sorted(os.listdir(saved)) == ["0", "1"]
    watch.gone(run.id)


@pytest.mark.long_on_executors
def test_each_rank_gets_sigterm_once(make: Make, tmp_path: Path) -> None:
    """Where another has failed, its node knows before the driver's order comes."""

    def count(folder: str) -> None:
        def note(*_: object) -> None:
            with open(Path(folder, "signals"), "a") as file:
                file.write("x")

        signal.signal(signal.SIGTERM, note)
        Path(folder, os.environ["RANK"]).touch()
        while os.environ["RANK"] == "1" and not Path(folder, "0").exists():
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            raise ValueError("enough")
        while not Path(folder, "go").exists():
            time.sleep(0.01)

    run = make(2, grace_period=600.0).submit(count, str(tmp_path))
    watch.until(lambda: (tmp_path / "signals").exists() and run.status is Status.STOPPING)
    for _ in range(2):  # what was ordered before has arrived then
        watch.until(lambda: "in count" in run.dump_stacks(0.5).get(0, ""))
    (tmp_path / "go").touch()
    with pytest.raises(TrainingError, match="ValueError: enough"):
        run.result(watch.DEADLINE)
    assert (tmp_path / "signals").read_text() == "x"


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.long_on_executors
def test_ranks_that_ignore_sigterm_are_killed_after_the_grace_or_by_order(
    make: Make, tmp_path: Path, killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def ignore(ready: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(ready, os.environ["RANK"]).touch()
        while True:
            time.sleep(1)

    run = make(2, grace_period=600.0 if killed else 0.5).submit(ignore, str(tmp_path))
    watch.until(lambda: len(os.listdir(tmp_path)) == 2)
    run.cancel("enough")
    if killed:
        assert re.fullmatch(r"enough; ranks have (600|5\d\d) s left to save", run.snapshot().detail)
        run.kill()
        assert run.snapshot().detail in ("killed", "")
    assert run.wait(watch.DEADLINE)
    with pytest.raises(RunCancelledError):
        run.result()
    warning = re.search(
        r"killed ranks? [01](-1)?, which had not ended 0.5 s after SIGTERM: raise grace_period", caplog.text
    )
    assert (warning is None) is killed
    watch.gone(run.id)


@pytest.mark.long_on_executors
def test_a_launcher_that_hangs_is_killed_with_its_ranks_after_the_grace(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def outlast(folder: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(folder, os.environ["RANK"]).touch()
        if os.environ["RANK"] == "1":
            watch.until(lambda: Path(folder, "0").exists())
            psutil.Process().parent().send_signal(signal.SIGSTOP)
            Path(folder, "stopped").touch()
        while True:
            time.sleep(1)

    run = make(2, grace_period=0.5).submit(outlast, str(tmp_path))
    watch.until(lambda: (tmp_path / "stopped").exists())
    run.cancel("enough")
    with pytest.raises(RunCancelledError):
        run.result(watch.DEADLINE)
    assert re.search("killed ranks? (0-)?1, which had not ended 0.5 s after SIGTERM: raise grace_period", caplog.text)
    watch.gone(run.id)


def test_a_run_is_watched_while_it_goes(make: Make, mode: str, tmp_path: Path) -> None:
    with redirect_stdout(io.StringIO()) as shown:  # pytest's own may lose what comes while it is read
        run = make(2).submit(trainings.wait_for, str(tmp_path / "go"))
        watch.until(lambda: run.status is Status.RUNNING)
        watch.until(lambda: shown.getvalue().count("] waiting\n") == 2)
    assert not run.wait(0.01)
    with pytest.raises(TimeoutError, match="running"):
        run.result(timeout=0.01)
    assert run.id in repr(run)
    (tmp_path / "go").touch()
    assert run.results(timeout=watch.DEADLINE) == [0, 1]
    *phases, total = run.timings.values()
    assert list(run.timings)[-1] == "total"
    assert all(seconds >= 0 for seconds in phases)
    assert sum(phases) == pytest.approx(total)
    assert run.timings["function"] > 0.01
    assert (run.timings["worker"] > 0) == (mode != LOCAL)


def test_a_value_that_cannot_be_pickled_names_rank_and_type(make: Make) -> None:
    with pytest.raises(ResultError, match=r"rank 0 on .* finished, but its return value of type _thread\.lock"):
        make(2).run(threading.Lock)


@pytest.mark.long_on_executors
def test_only_values_that_are_asked_for_have_to_be_picklable(make: Make) -> None:
    def only_rank_0_plain() -> object:
        return 1 if os.environ["RANK"] == "0" else threading.Lock()

    assert make(2).run(only_rank_0_plain) == 1
    with pytest.raises(ResultError, match="rank 1"):
        make(2).submit(only_rank_0_plain).results()


@pytest.mark.long_on_executors
def test_an_exception_that_holds_a_lock_comes_back_without_it(make: Make) -> None:
    def fail() -> None:
        error = ValueError("holds a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(TrainingError, match="ValueError: holds a lock") as caught:
        make(1).run(fail)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert (cause.args, vars(cause)) == (("holds a lock",), {})


def test_output_is_whole_prefixed_and_in_order(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        for step in range(500):
            print(f"step {step} " + "x" * 1000)
        print("oops", file=sys.stderr)
        os.write(1, b"no newline \xff at the end")

    make(2).run(talk)
    captured = capfd.readouterr()
    for rank in range(2):
        lines = [line for line in captured.out.splitlines() if line.startswith(f"[rank {rank} ")]
        assert [line.split()[4] for line in lines[:500]] == [str(step) for step in range(500)]
        assert all(line.endswith("x" * 1000) for line in lines[:500])
        assert lines[500].endswith("no newline \ufffd at the end")
        assert f"[rank {rank} " in captured.err
    assert captured.err.count("] oops") == 2


@pytest.mark.long_on_executors
def test_ranks_start_as_a_fresh_process_would(make: Make) -> None:
    def look() -> dict[str, object]:
        import multiprocessing

        return {
            "stdin": sys.stdin.read(),
            "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "sockets": [p for p in os.listdir("/proc/self/fd") if "socket:" in _readlink(f"/proc/self/fd/{p}")],
            "main": multiprocessing.current_process().name,
            "threads": threading.active_count(),
        }

    def _readlink(path: str) -> str:
        try:
            return os.readlink(path)
        except OSError:
            return ""

    for seen in make(2).submit(look).results():
        assert seen["stdin"] == ""
        assert seen["sigterm"] and seen["sigint"]
        assert seen["blocked"] == set()
        assert seen["sockets"] == []
        assert seen["main"] == "MainProcess"
        assert seen["threads"] == 1


@pytest.mark.slow
@pytest.mark.long_on_executors
@pytest.mark.parametrize("keep_warm", [600.0, pytest.param(0.0, marks=pytest.mark.long_on_executors)])
def test_ranks_are_forked_before_their_launcher_has_threads(make: Make, keep_warm: float) -> None:
    """That of the rendezvous store holds locks of libc now and then, which a fork would wait for for ever."""

    def look() -> tuple[int, list[int]]:
        import torch.distributed as dist

        dist.init_process_group("gloo")  # the store is there
        threads = [int(name) for name in os.listdir(f"/proc/{os.getppid()}/task")]
        return os.getpid(), [thread for thread in threads if thread != os.getppid()]

    looks = make(2, keep_warm=keep_warm).submit(look).results()
    assert any(threads for _, threads in looks)
    for pid, threads in looks:
        assert all(thread > pid for thread in threads)  # numbers are given in order


@pytest.mark.long_on_executors
def test_exit_callbacks_and_threads_of_a_rank_are_waited_for(make: Make, tmp_path: Path) -> None:
    def train(folder: str) -> int:
        import atexit

        def write(name: str) -> None:
            Path(folder, name).touch()

        atexit.register(write, "atexit")
        go = threading.Event()
        threading.Thread(target=lambda: (go.wait(), write("thread"))).start()
        go.set()
        return 1

    assert make(1).run(train, str(tmp_path)) == 1
    assert sorted(os.listdir(tmp_path)) == ["atexit", "thread"]


@pytest.mark.long_on_executors
def test_unflushed_output_is_not_lost(make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import ctypes, sys\nlog = open(sys.argv[1], 'w')\nlog.write('important')\n"
        "def use():\n    return log\nctypes.CDLL(None).printf(b'from C\\n')\n"
    )
    make(1).run(script, str(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "important"
    assert "] from C" in capfd.readouterr().out


@pytest.mark.long_on_executors
def test_a_failed_rank_does_not_wait_for_its_threads(make: Make) -> None:
    def train() -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("with a thread")

    with pytest.raises(TrainingError, match="ValueError: with a thread") as caught:
        make(1).submit(train).result(timeout=watch.DEADLINE)
    assert caught.value.exit_code == 1


@pytest.mark.long_on_executors
def test_exit_codes_are_those_of_the_operating_system(make: Make) -> None:
    assert make(1).run(sys.exit, 256) is None
    with pytest.raises(TrainingError, match="exited with code 255"):
        make(1).run(sys.exit, -1)
    with pytest.raises(TrainingError, match="exited with code 255"):
        make(1).run(sys.exit, 2**70)
    with pytest.raises(TrainingError, match="exited with code 1: out of luck"):
        make(1).run(sys.exit, "out of luck")
    with pytest.raises(TrainingError, match=r"exited with code 0 before the function returned \(os\._exit\?\)"):
        make(1).run(os._exit, 0)


@pytest.mark.long_on_executors
def test_the_first_line_of_an_odd_exception_is_the_error(make: Make) -> None:
    def fail(kind: str) -> None:
        if kind == "note":
            error = ValueError("first line\nsecond line")
            if hasattr(error, "add_note"):
                error.add_note("a note")
            raise error

        class NoText(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        raise NoText

    for kind, line in (("note", "failed: ValueError: first line"), ("no text", "NoText: <str() failed>")):
        with pytest.raises(TrainingError) as caught:
            make(1).run(fail, kind)
        assert str(caught.value).splitlines()[0].endswith(line)


@pytest.mark.long_on_executors
def test_signal_handlers_that_raise_do_not_hide_how_a_rank_ended(make: Make) -> None:
    def raise_from_handlers() -> None:
        def handle(number: int, frame: object) -> None:
            raise RuntimeError("from a signal handler")

        signal.signal(signal.SIGCHLD, handle)

    class Told(Exception):
        def __str__(self) -> str:
            os.kill(os.getpid(), signal.SIGCHLD)  # as torch's data loader does it: whatever Python is just doing
            return "what went wrong"

    class Value:
        def __reduce__(self) -> tuple[type[int], tuple[str]]:
            os.kill(os.getpid(), signal.SIGCHLD)
            return int, ("7",)

    def fail() -> None:
        raise_from_handlers()
        raise Told

    def give() -> Value:
        raise_from_handlers()
        return Value()

    with pytest.raises(TrainingError, match="Told: what went wrong"):
        make(2).run(fail)
    assert make(2).run(give) == 7


@pytest.mark.long_on_executors
def test_environment_is_added_and_forwarded(
    make: Make, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "digits")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("UNRELATED_TO_IT", "1")
    names = ("WANDB_PROJECT", "WANDB_MODE", "UNRELATED_TO_IT", "EXTRA", "OMP_NUM_THREADS")
    (tmp_path / "found_there.py").touch()
    env = {"EXTRA": "yes", "WANDB_MODE": "online", "OMP_NUM_THREADS": "3", "PYTHONPATH": str(tmp_path)}
    distributor = make(1, env=env, forward_env=["WANDB_*"])
    assert distributor.run(lambda: importlib.import_module("found_there").__name__) == "found_there"
    env = distributor.run(trainings.environment, *names)
    assert env["WANDB_PROJECT"] == "digits"
    assert env["WANDB_MODE"] == "online"
    assert env["EXTRA"] == "yes"
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["UNRELATED_TO_IT"] == ("1" if mode == LOCAL else None)


@pytest.mark.long_on_executors
def test_arguments_have_pysparks_names(make: Make) -> None:
    assert make(1).run(train_object=trainings.rank) == 0
    assert make(1).submit(train_object=trainings.rank).result() == 0


def test_two_runs_at_the_same_time_do_not_meet(make: Make, tmp_path: Path) -> None:
    first = make(2).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: first.status is Status.RUNNING)
    assert make(2).run(trainings.all_reduce) == 3.0
    with pytest.raises(TrainingError):
        make(2).run(trainings.fail_on_rank_1, "raise")
    assert first.status is Status.RUNNING
    (tmp_path / "go").touch()
    assert first.results(timeout=watch.DEADLINE) == [0, 1]


@pytest.mark.long_on_executors
@pytest.mark.slow
def test_twenty_runs_leave_nothing_behind(make: Make, mode: str) -> None:
    make(2).run(trainings.all_reduce)  # what is made once per process
    environ, cwd = dict(os.environ), Path.cwd()
    threads, descriptors, folders = threading.active_count(), watch.open_descriptors(), watch.folders()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    before = _worker_environment(mode)
    for index in range(20):
        if index % 5 == 4:
            with pytest.raises(TrainingError):
                make(2).run(trainings.fail_on_rank_1, "raise")
        else:
            assert make(2).run(trainings.all_reduce) == 3.0
    watch.gone()
    assert dict(os.environ) == environ
    assert Path.cwd() == cwd
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    watch.until(lambda: threading.active_count() <= threads)
    assert watch.open_descriptors() <= descriptors
    watch.until(lambda: watch.folders() <= folders)
    assert _worker_environment(mode) == before
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


def _worker_environment(mode: str) -> dict[str, dict[str, str]]:
    """What Spark's Python workers look like to the next job, environment and modules, by executor."""
    if mode == LOCAL:
        return {}
    from distributor.schedulers.spark.sessions import active_session, context_for_tasks

    session = active_session()
    assert session is not None

    def look(_: object) -> list[tuple[str, dict[str, str]]]:
        loaded = ",".join(sorted(name for name in sys.modules if name.partition(".")[0] in ("distributor", "torch")))
        per_task = ("SPARK_JOB_ARTIFACT_UUID",)
        environ = {name: value for name, value in os.environ.items() if name not in per_task}
        return [(os.getcwd(), {**environ, "loaded": loaded})]

    # A barrier of as many tasks as there are slots reaches every executor.
    return dict(context_for_tasks(session).parallelize(range(4), 4).barrier().mapPartitions(look).collect())
