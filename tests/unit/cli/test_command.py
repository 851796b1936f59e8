"""The command line's decisions; that it runs anything is tested in ``test_command_line.py``."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_distributor import Fake

import distributor
from distributor.cli import command
from distributor.errors import (
    ConfigurationError,
    DistributorError,
    NodeLostError,
    RunCancelledError,
    StartError,
    TrainingError,
)
from distributor.launch.torchrun import Torchrun
from distributor.text import notices
from distributor.values.outcome import Failure


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    return str(path)


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any master answers."""
    monkeypatch.setattr("distributor.schedulers.spark.preflight.check", lambda *_: None)


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the session of another test."""
    monkeypatch.setattr("distributor.schedulers.spark.sessions.active_session", lambda: None)


def test_options_are_the_arguments_of_the_api(fake: type[Fake]) -> None:
    given = (
        "run -n 4 --local --no-gpu --env A=1 --env B=x=y --forward-env WANDB_* --working-dir . --log-dir logs "
        "--logs 0,3 --fold-logs --no-prefix --log-escapes --no-progress "
        "--cpus-per-process 2 --memory-per-process 8g "
        "--max-processes-per-node 2 --start-timeout 5 --stall-timeout 6 --grace-period 7 --heartbeat-timeout 8 "
        "--output-dir out --output-limit 8g --checkpoints saved "
        "--start-method spawn --local-ranks host --require-group --max-restarts 3 "
        "--restart-on any --resume auto --name digits train.py --lr 0.1 --local"
    )
    assert command.call(given.split()) == 0
    args, options = fake.asked
    assert args == (4, True, False)
    assert fake.ran == ("run", "train.py", "--lr", "0.1", "--local")
    assert options == {
        "launch": Torchrun(),
        "name": "digits",
        "env": {"A": "1", "B": "x=y"},
        "forward_env": ("WANDB_*",),
        "working_dir": ".",
        "working_dir_limit": "256m",
        "output_dir": "out",
        "output_limit": "8g",
        "checkpoints": "saved",
        "log_dir": "logs",
        "logs": [0, 3],
        "fold_logs": True,
        "log_prefix": False,
        "log_escapes": True,
        "progress": False,
        "driver_ports": None,
        "gpus_per_process": None,
        "cpus_per_process": 2,
        "memory_per_process": "8g",
        "max_processes_per_node": 2,
        "start_timeout": 5.0,
        "stall_timeout": 6.0,
        "grace_period": 7.0,
        "heartbeat_timeout": 8.0,
        "start_method": "spawn",
        "local_ranks": "host",
        "require_group": True,
        "max_restarts": 3,
        "restart_on": "any",
        "resume": "auto",
        "keep_warm": 0.0,
    }


def test_a_module_and_its_arguments(fake: type[Fake]) -> None:
    assert command.call(["run", "-n", "2", "-m", "pkg.train", "--lr", "0.1", "-n", "3"]) == 0
    assert fake.asked[0] == (2, True, True)
    assert fake.ran == ("module", "pkg.train", "--lr", "0.1", "-n", "3")


@pytest.mark.usefixtures("ready")
def test_a_master_means_spark(script: str, fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, asked = [], []

    class Session:
        def stop(self) -> None:
            stopped.append(True)

    def create(master: str | None, settings: dict[str, str]) -> Session:
        asked.append((master, settings))
        return Session()

    monkeypatch.setattr("distributor.schedulers.spark.sessions.create", create)
    assert command.call(["run", "--master", "spark://a:7077", "--conf", "spark.executor.memory=8g", script]) == 0
    assert fake.asked[0] == (1, False, True)
    assert asked == [("spark://a:7077", {"spark.ui.showConsoleProgress": "false", "spark.executor.memory": "8g"})]
    assert stopped == [True]


@pytest.mark.usefixtures("ready")
def test_signals_are_given_back_once_there_is_a_session(
    script: str, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*_: object) -> Any:
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is command._give_up
        assert threading.current_thread() is not threading.main_thread()  # or Spark would set a handler of its own
        return SimpleNamespace(stop=lambda: None)

    before = signal.getsignal(signal.SIGINT)
    during = []
    monkeypatch.setattr("distributor.schedulers.spark.sessions.create", create)
    monkeypatch.setattr(Fake, "run", lambda *_: during.extend(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))))
    assert command.call(["run", "--master", "sc://host", script]) == 0
    assert during == [before, command._end]
    assert signal.getsignal(signal.SIGINT) is before


def test_warnings_have_the_prefix_distributor(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        notices.logger.warning("vm cannot preload")
        notices.inform("begins at step 0")
        notices.show_on(shown.append)
        notices.logger.warning("beside the status")
        notices.leave(shown.append)

    shown = list[str]()
    monkeypatch.setattr(notices.logger, "handlers", [notices._handler])  # without pytest's own
    monkeypatch.setattr(notices.logger, "propagate", False)
    monkeypatch.setattr(Fake, "run", run)
    assert command.call(["run", "train.py"]) == 0
    assert capsys.readouterr().err == "[distributor] vm cannot preload\n[distributor] begins at step 0\n"
    assert shown == ["beside the status"]


def test_under_spark_submit_its_session_decides(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setattr("distributor.schedulers.spark.sessions.create", lambda *args: asked.append(args))
    assert command.call(["run", "train.py"]) == 0
    assert fake.asked[0] == (1, None, True)
    assert asked == [(None, {"spark.ui.showConsoleProgress": "false"})]
    assert command.call(["run", "--local", "train.py"]) == 0
    assert fake.asked[0] == (1, True, True)
    assert len(asked) == 1


def test_spark_submit_passes_no_stdin_on(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be a pipe that never ends."""
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert command.call(["run", "/dev/fd/0"]) == 2
    assert capsys.readouterr().err == (
        "distributor: /dev/fd/0 never ends under spark-submit, which keeps its standard input to itself: write the "
        "script to a file, or run the distributor command itself with --master\n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("run", "Missing argument 'SCRIPT'"),
        ("run -n x train.py", "'x' is not a number, nor a range such as 4:16"),
        ("run --local --no-gpu -n 4:2 train.py", "--num-processes (4, 2) must have the lower number first"),
        ("run --no-such-option train.py", "No such option"),
        ("walk", "No such command 'walk'"),
        ("run --local --master yarn train.py", "--local and --master yarn exclude each other: leave one of them out"),
        ("run --conf a=b train.py", "--conf a=b is only for runs on Spark: remove it, or add --master"),
        ("run --driver-ports 47 train.py", "--driver-ports 47 is only for runs on Spark: remove it, or add --master"),
        ("run --no-gpu --master foo://x train.py", "'foo://x' is not a master that Spark knows: use"),
        ("run --nproc-per-node 4 train.py", "--nproc-per-node belongs to torchrun: use --num-processes for the total"),
        ("run --nproc_per_node=4 train.py", "--nproc_per_node belongs to torchrun: use --num-processes for the total"),
        ("run --nnodes 2 train.py", "--nnodes belongs to torchrun: use --num-processes for the total number of ranks;"),
        ("run --rdzv-endpoint a:1 train.py", "--rdzv-endpoint belongs to torchrun: leave it out, since nodes find"),
        ("run --no-gpu -m no_such.module", "there is no module 'no_such.module' in the current directory /"),
        ("run --no-gpu -m --working-dir / no.such", "there is no module 'no.such' in --working-dir /, the current dir"),
        ("run --no-gpu --logs rank1 train.py", "--logs takes all, rank0, none or ranks (0,3), not 'rank1'"),
        ("run --master yarn --driver-ports 9-8 t.py", "--driver-ports must be two ports from 1 to 65535"),
        ("completion", "Missing argument"),
        ("run --env A train.py", "--env takes NAME=VALUE, not 'A'"),
        ("run --master yarn --driver-ports x train.py", "--driver-ports takes a port or a range such as 4700-4710"),
        ("run -n 0 --no-gpu train.py", "--num-processes must be a positive integer, not 0"),
        ("run --no-gpu --gpus-per-process 2 train.py", "--gpus-per-process 2 contradicts --no-gpu: leave one of them"),
        ("run --no-gpu --logs 7 train.py", "the option --logs contains rank 7, but with --num-processes 1, ranks go"),
        ("run -n 0 t.py --no-gpu --lr 1 -n 2", "not 0 (--no-gpu, -n after the script belong to the script: put"),
        ("run -n 0 t.py --local=1", "not 0 (--local=1 after the script belongs to the script: put distributor's"),
        ("run --no-gpu no_such.py", "there is no script 'no_such.py' in the current directory /"),
        ("run --no-gpu --working-dir / no_such.py", "no script 'no_such.py' in --working-dir / or the current"),
        ("run --no-gpu /no_such.py", "there is no script '/no_such.py'\n"),
        ("run --no-gpu --master spark://127.0.0.1:1 no_such.py", "there is no script 'no_such.py' in the current"),
        ("run --master spark://a t.py", "the master 'spark://a' names no port: add it (7077 unless the master was"),
        ("run --master spark://a:7077/x t.py", "'spark://a:7077/x' has more than a host and a port: use"),
        ("run --master spark://a:b t.py", "the master 'spark://a:b' is not a URL: "),
        ("run --master sc://:1 t.py", "the master 'sc://:1' names no host: use spark://host:7077 or sc://host"),
        ("run --no-gpu train.sh", "there is no script 'train.sh' in the current directory "),
        ("run --no-gpu --deepspeed no.json train.py", "no.json"),
        ("run --no-gpu --accelerate no.yaml train.py", "there is no Accelerate configuration 'no.yaml'"),
        ("run --no-gpu --accelerate a.yaml --deepspeed ds.json train.py", "--deepspeed and --accelerate select"),
        ("run --launch accelerate --deepspeed ds.json t.py", "--launch accelerate takes no --deepspeed ds.json: leave"),
        ("run --no-gpu --script-arguments trainer t.py", "--script-arguments trainer is for --launch deepspeed: add"),
        ("run --accelerate a.yaml --script-arguments deepspeed t.py", "--script-arguments deepspeed is for --launch"),
    ],
)
def test_a_request_that_is_wrong_ends_in_one_line_and_2(
    arguments: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    assert command.call(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("distributor: ")
    assert told in err
    assert err.count("\n") == 1


def test_without_pyspark_there_is_no_spark(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pyspark", "pyspark.sql", "pyspark.version"):
        monkeypatch.setitem(sys.modules, name, None)
    assert command.call(["run", "--master", "local-cluster[2,1,1024]", "--no-gpu", script]) == 2
    assert "training on Spark needs pyspark, which cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TrainingError("", [Failure(1, 1, "a", "exit", "exited with code 7", exit_code=7)]), 7),
        (TrainingError("", [Failure(1, 1, "a", "ValueError", "", exit_code=1)]), 1),
        (TrainingError("", [Failure(1, 1, "a", "signal", "killed by SIGKILL", signal="SIGKILL")]), 137),
        (TrainingError("", [Failure(1, 1, "a", "signal", "", signal="SIGSEGV")]), 139),
        (TrainingError("", [Failure(1, 1, "a", "signal", "killed by signal 40", signal="signal 40")]), 168),
        (TrainingError("", [Failure(1, 1, "a", "exit", "ended before it returned", exit_code=0)]), 1),
        (TrainingError(""), 1),
        (NodeLostError(""), 1),
        (StartError(""), 1),
        (RunCancelledError(""), 1),
    ],
)
def test_exit_codes(error: DistributorError, code: int, fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Fake, "run", fail)
    assert command.call(["run", "train.py"]) == command.exit_code(error) == code


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "num_processes=4 needs 4 slots: lower num_processes",
            "--num-processes 4 needs 4 slots: lower --num-processes",
        ),
        ("pass use_gpu=False, or local_mode=False to", "pass --no-gpu, or --master URL to"),
        ("start_timeout=1 s", "--start-timeout 1 s"),
        ("working_dir 'a' holds more than working_dir_limit", "--working-dir 'a' holds more than --working-dir-limit"),
        ("working_dir_limits", "working_dir_limits"),
        (
            "log_dir 'log_dir' cannot be used: raise num_processes.",
            "--log-dir 'log_dir' cannot be used: raise --num-processes.",
        ),
        ("there is no script '/a/output_dir/log_dir.py'", "there is no script '/a/output_dir/log_dir.py'"),
        ("deepspeedConfig 'deepspeedConfig.json' cannot be read", "--deepspeed 'deepspeedConfig.json' cannot be read"),
    ],
)
def test_errors_name_options_in_place_of_arguments(said: str, told: str) -> None:
    assert command.as_options(said) == told


@pytest.mark.usefixtures("no_session")
def test_a_folder_that_is_too_large_names_the_option(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(257 << 20)
    run = ["run", "--master", "spark://a:7077", "--no-gpu", "--working-dir", str(tmp_path), "--dry-run"]
    assert command.call([*run, script]) == 2
    err = capsys.readouterr().err
    assert f"--working-dir '{tmp_path}' holds 257 MiB, more than --working-dir-limit (256 MiB)" in err
    assert err.endswith("Keep data on shared storage, or raise --working-dir-limit\n")
    assert command.call([*run, "--working-dir-limit", "258m", script]) == 0


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.call(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"distributor, version {distributor.__version__}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.call(["completion", shell]) == 0
    assert "_DISTRIBUTOR_COMPLETE" in capsys.readouterr().out


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert command.call(["run", "--help"]) == 0
    out = capsys.readouterr().out
    for parameter in command.run.params:
        for option in parameter.opts:
            assert option in out or option.upper() in out
    for panel in ("What to run", "Where", "Each rank", "Output", "Time limits"):
        assert panel in out


def test_the_script_path_is_the_file_for_spark_submit(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.call(["script-path"]) == 0
    assert Path(capsys.readouterr().out.strip()) == Path(distributor.__file__).with_name("__main__.py")


def test_sparks_reason_is_given_if_there_is_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    class Builder:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: self

        def getOrCreate(self) -> None:
            raise RuntimeError(
                "An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.\n"
                ": org.apache.spark.SparkException: Could not parse Master URL: 'no'\n\tat org.apache.spark"
            )

    monkeypatch.setattr(SparkSession, "builder", Builder())
    monkeypatch.setattr("distributor.schedulers.spark.sessions._start_java", lambda settings: None)
    with pytest.raises(ConfigurationError) as caught:
        command._session("yarn", {})
    assert str(caught.value) == "no Spark session with master yarn: Could not parse Master URL: 'no'"


def test_help_at_80_columns_breaks_no_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command.call(["run", "--help"]) == 0
    words = {word for line in capsys.readouterr().out.splitlines() for word in line.strip("│ ").split()}
    for parameter in command.run.params:
        names = [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")]
        assert {*names, *getattr(parameter.type, "choices", ())} <= words, parameter.name
