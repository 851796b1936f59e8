"""Bad input: a clear error before any process or Spark job starts."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import hosts
import pytest
import trainings
import watch

from distributor import (
    Checkpoints,
    ConfigurationError,
    DeepspeedTorchDistributor,
    PayloadError,
    ResourceError,
    TorchDistributor,
)
from distributor.api.build import make_log_folder, pack_working_dir
from distributor.schedulers import local
from distributor.values.job import Module, Script
from distributor.values.options import Project


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an agent was started")

    monkeypatch.setattr("distributor.schedulers.hosting.host_node.HostedNode.start", refuse)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_processes": 0}, "num_processes must be a positive integer, not 0"),
        ({"num_processes": "2"}, "num_processes must be a positive integer, not '2'"),
        ({"num_processes": True}, "num_processes must be a positive integer, not True"),
        ({"local_mode": "yes"}, "local_mode must be True, False or None, not 'yes'"),
        ({"name": 7}, "name must be one line of text, not 7"),
        ({"name": " "}, "name must be one line of text, not ' '"),
        ({"name": "a\nb"}, "name must be one line of text, not 'a\\nb'"),
        ({"name": "x" * 101}, "name must have at most 100 characters, not 101: shorten it"),
        ({"use_gpu": None}, "use_gpu must be True or False, not None"),
        ({"gpus_per_process": 0, "use_gpu": True}, "gpus_per_process must be a positive integer, not 0"),
        ({"gpus_per_process": 0.5, "use_gpu": True}, "gpus_per_process must be a whole number, not 0.5: ranks"),
        ({"max_restarts": -1}, "max_restarts must be an integer of at least 0, not -1"),
        ({"max_restarts": 1.5}, "max_restarts must be an integer of at least 0, not 1.5"),
        ({"restart_on": "all"}, "restart_on must be 'infrastructure' or 'any', not 'all'"),
        ({"cpus_per_process": 1.5}, "cpus_per_process must be a positive integer, not 1.5"),
        ({"max_processes_per_node": 0}, "max_processes_per_node must be a positive integer, not 0"),
        ({"memory_per_process": "8 gigs"}, "memory_per_process must be a size such as '8g' or a number of bytes"),
        ({"memory_per_process": 0}, "memory_per_process must be a size such as '8g' or a number of bytes, and at"),
        ({"memory_per_process": 4}, "a number of bytes, and at least a million bytes, not 4"),
        ({"memory_per_process": 1.5}, "a number of bytes, and at least a million bytes, not 1.5"),
        ({"start_timeout": -1}, "start_timeout must be a number of seconds from 0 to a year, not -1"),
        ({"grace_period": float("inf")}, "grace_period must be a number of seconds from 0 to a year, not inf"),
        ({"keep_warm": -1}, "keep_warm must be a number of seconds from 0 to a year, not -1"),
        ({"start_method": "forkserver"}, "start_method must be 'fork' or 'spawn', not 'forkserver'"),
        ({"preload": "torch"}, "preload must be a list of module names, not 'torch'"),
        ({"preload": ["torch.nn", "a b"]}, "preload must name modules such as 'transformers', not 'a b'"),
        ({"preload": ["torch"], "start_method": "spawn"}, "preload=['torch'] needs a warm process, which imports"),
        ({"stall_timeout": 0.5}, "stall_timeout must be a number of seconds from 1 to a year, not 0.5"),
        ({"logs": "rank1"}, "logs must be 'all', 'rank0', 'none' or a list of ranks, not 'rank1'"),
        ({"logs": 0}, "logs must be 'all', 'rank0', 'none' or a list of ranks, not 0"),
        ({"num_processes": 2, "logs": ["0"]}, "logs must list ranks as numbers, not '0'"),
        (
            {"driver_ports": 4700},
            "driver_ports must be two ports from 1 to 65535, the first and the last of a range such as (7000, 7100), "
            "not 4700",
        ),
        ({"driver_ports": (4710, 4700)}, "driver_ports must be two ports from 1 to 65535, the first and the last"),
        ({"driver_ports": (0, 5)}, "driver_ports must be two ports from 1 to 65535, the first and the last of a range"),
        ({"env": {"SEED": 1}}, "env must map strings to strings, but the value of 'SEED' is of type int"),
        ({"env": {"A=B": "1"}}, "env cannot set the variable 'A=B'"),
        ({"env": {"A": "1\0"}}, "env cannot set the variable 'A'"),
        ({"local_mode": 2, "use_gpu": False}, "local_mode must be True, False or None, not 2"),
        ({"forward_env": "WANDB_*"}, "forward_env must be a list of patterns such as ['WANDB_*'], not 'WANDB_*'"),
        ({"forward_env": 1}, "forward_env must be a list of patterns such as ['WANDB_*'], not 1"),
        ({"forward_env": [1]}, "forward_env must list patterns such as 'WANDB_*', not 1"),
        ({"env": ["A=1"]}, "env must be a dict such as {'SEED': '1'}, not list"),
        ({"env": "A=1"}, "env must be a dict such as {'SEED': '1'}, not str"),
        ({"env": {1: "a"}}, "env must map strings to strings, but the name 1 is not a string"),
        ({"checkpoints": 3}, "checkpoints must be the path of a folder or a URL"),
        ({"checkpoints": Path("s3://bucket/run")}, "checkpoints is 's3:/bucket/run', which is neither a path nor"),
        ({"output_dir": "dbfs:/run"}, "output_dir is 'dbfs:/run', which is neither a path nor a URL"),
        ({"log_dir": 5}, "log_dir must be the path of a folder, not 5"),
        ({"working_dir": ["a"]}, "working_dir must be the path of a folder, not ['a']"),
        ({"working_dir_limit": "1 gig"}, "working_dir_limit must be a size such as '8g' or a number of bytes"),
        ({"progress": "no"}, "progress must be True or False, not 'no'"),
        ({"fold_logs": 1.0}, "fold_logs must be True or False, not 1.0"),
        ({"log_prefix": None}, "log_prefix must be True or False, not None"),
        ({"log_escapes": [1]}, "log_escapes must be True or False, not [1]"),
    ],
)
def test_arguments_of_the_distributor(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TorchDistributor(**arguments)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)


async def asleep() -> None:
    """Does nothing unless somebody runs it."""


def batches() -> Iterator[int]:
    """Does nothing unless somebody iterates over it."""
    yield 1


async def batches_later() -> AsyncIterator[int]:
    """Does nothing unless somebody runs it and iterates over it."""
    yield 1


class Batches:
    def __call__(self) -> Iterator[int]:
        yield 1


def on_cpu(**options: Any) -> TorchDistributor:
    return TorchDistributor(1, True, False, **options)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((17,), {}, ConfigurationError, "must be a callable or the path of a script, not int 17"),
        (("train.sh",), {}, PayloadError, "there is no script 'train.sh' in the current directory /"),
        (("pkg.train",), {}, PayloadError, ": for a module, use run_module('pkg.train'), or -m pkg.train in a shell"),
        (("absent.py",), {}, PayloadError, "there is no script 'absent.py' in the current directory /"),
        ((asleep,), {}, ConfigurationError, "asleep is a coroutine function, and calling it runs nothing: pass a"),
        ((batches,), {}, ConfigurationError, "batches is a generator function, and calling it runs nothing: pass a"),
        ((functools.partial(batches_later),), {}, ConfigurationError, "batches_later is an asynchronous generator"),
        ((Batches(),), {}, ConfigurationError, "Batches is a generator function, and calling it runs nothing"),
        (("script.py",), {"lr": 1}, ConfigurationError, "no keyword arguments (lr): pass them as '--name', 'value'"),
        (("script.py", "--lr", [0.1]), {}, ConfigurationError, "paths or enums, but argument 2 is [0.1] (list)"),
    ],
)
def test_objects_that_cannot_be_trained_are_refused(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: type[Exception],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        on_cpu().run(*args, **kwargs)
    assert text in str(caught.value)


def test_a_module_has_to_be_a_dotted_name() -> None:
    with pytest.raises(ConfigurationError, match="dotted name such as 'pkg.train', not 'pkg/train.py'"):
        on_cpu().run_module("pkg/train.py")
    with pytest.raises(ConfigurationError, match="dotted name such as 'pkg.train', not 'train.py'"):
        on_cpu().run_module("train.py")
    with pytest.raises(ConfigurationError, match=r"argument 2 is None \(NoneType\)"):
        on_cpu().run_module("pkg.train", "--lr", None)  # type: ignore[arg-type]


def test_a_module_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("__init__.py", "train.py"):
        (tmp_path / "pkg" / name).touch()
    with pytest.raises(PayloadError, match="no module 'pkg.train' in the current directory /.* or on Python's path: /"):
        on_cpu().run_module("pkg.train")
    there = on_cpu(working_dir=tmp_path)
    assert there.plan(Module("pkg.train")).title == "pkg.train"
    with pytest.raises(PayloadError, match=f"no module 'pkg.other' in working_dir {tmp_path}, the current directory"):
        there.run_module("pkg.other")
    with pytest.raises(PayloadError, match="'pkg' is a package without a module __main__, so it cannot be run"):
        there.run_module("pkg")
    (tmp_path / "pkg" / "__main__.py").touch()
    assert there.plan(Module("pkg")).title == "pkg"
    monkeypatch.chdir(tmp_path)
    assert on_cpu().plan(Module("pkg.train")).title == "pkg.train"
    # Executors may have what the driver lacks.
    spark = TorchDistributor(1, False, False)
    monkeypatch.setattr("distributor.api.distributor.choose_session", lambda *_, **__: (None, False))
    assert spark.plan(Module("pkg.elsewhere")).title == "pkg.elsewhere"


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def configured() -> Any:
        return function(1e-3)

    return configured


def training(learning_rate: float, *, epochs: int = 1) -> None:
    """Takes one argument, or one more by name."""


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "text"),
    [
        (training, (), {}, "missing a required argument: 'learning_rate'"),
        (training, (1, 2), {}, "too many positional arguments"),
        (training, (1,), {"lr": 1}, "got an unexpected keyword argument 'lr'"),
        (functools.partial(training, 1), (2,), {}, "too many positional arguments"),
        (decorated(training), (1,), {}, "too many positional arguments"),
    ],
)
def test_a_function_has_to_take_its_arguments(function: Any, args: Any, kwargs: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        on_cpu().run(function, *args, **kwargs)
    assert str(caught.value).endswith(f") cannot be called with these arguments: {text}")
    assert str(caught.value).startswith(("training(", "decorated.<locals>.configured("))


def test_what_can_be_called_is_not_refused() -> None:
    for call in ((training, 1), (functools.partial(training, 1),), (decorated(training),), (max, 1, 2), (dict,)):
        assert on_cpu().plan(*call).resources.num_processes == 1


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(PayloadError, match=r"the variable 'lock' that it uses is a _thread\.lock"):
        on_cpu().run(lambda: lock)


def test_a_working_dir_has_to_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="is not a folder on the driver"):
        on_cpu(working_dir=tmp_path / "absent").run(trainings.rank)


def test_what_cannot_be_read_is_an_error_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "memory").symlink_to("/proc/self/mem")
    with pytest.raises(PayloadError, match=f"working_dir '{tmp_path}' cannot be read: .*Input/output error"):
        pack(tmp_path)


def test_a_project_travels_that_is_the_place_of_checkpoints_and_logs(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").touch()
    for place in (tmp_path, tmp_path / "project"):
        asked = Project(working_dir=tmp_path / "project", checkpoints=Checkpoints(str(place)))
        packed = pack_working_dir(asked, local=False, view=None, log_dir=place)
        assert packed is not None and packed.archive is not None
        assert zipfile.ZipFile(io.BytesIO(packed.archive)).namelist() == ["train.py"]


@pytest.mark.parametrize("local", [True, False])
def test_scripts_are_found_in_the_working_dir_and_then_here(
    local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, here = tmp_path / "project", tmp_path / "here"
    for path in (project / "train.py", here / "train.py", here / "other.py"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.chdir(here)
    distributor = TorchDistributor(1, local, False, working_dir="../project")
    monkeypatch.setattr("distributor.api.distributor.choose_session", lambda *_, **__: (None, local))

    def found(name: str) -> tuple[str, str | None]:
        script = distributor.plan(name).target
        assert isinstance(script, Script)
        return os.path.realpath(script.path), script.inside

    assert found("train.py") == (str(project / "train.py"), "train.py")
    assert found("other.py") == (str(here / "other.py"), None)
    assert found(str(here / "train.py")) == (str(here / "train.py"), None)
    with pytest.raises(PayloadError) as caught:
        distributor.plan("absent.py")
    assert str(caught.value) == (
        f"there is no script 'absent.py' in working_dir ../project or the current directory {here}"
    )


def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").mkdir()
    with pytest.raises(PayloadError, match=r"the script '.*/train\.py' cannot be read: Is a directory"):
        on_cpu().run(tmp_path / "train.py")


def test_what_lives_on_the_driver_only_is_told_apart() -> None:
    class DataFrame:
        """As pyspark's: it cannot be pickled, and no function can make it anew."""

        def __reduce__(self) -> str:
            raise TypeError("no")

    DataFrame.__module__ = "pyspark.sql.dataframe"
    df = DataFrame()
    with pytest.raises(
        PayloadError, match=r"the variable 'df' that it uses is a pyspark.* cannot be pickled, since it"
    ):
        on_cpu().run(lambda: df)


def test_a_missing_deepspeed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    distributor = DeepspeedTorchDistributor(1, 1, True, False, {"train_batch_size": 1})
    monkeypatch.setattr("distributor.shipping.modules.find", lambda name, folders=(): None)
    with pytest.raises(
        ConfigurationError, match=r"deepspeedConfig needs deepspeed, which is not installed for .*: pip install"
    ):
        distributor.run(trainings.rank)
    assert DeepspeedTorchDistributor(1, 1, True, False).plan(trainings.rank).launch.name == "deepspeed"


@pytest.mark.usefixtures("fake_gpus")
def test_missing_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ResourceError, match="this machine, the driver, has no visible GPU .*: pass use_gpu=False"):
        TorchDistributor(1, True)
    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="has no visible GPU"):
        patch.delitem(sys.modules, "pyspark", raising=False)  # another test's session may be active
        TorchDistributor(1).run(trainings.rank)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with pytest.raises(ResourceError, match="needs 3 GPUs, but this machine has 2 visible GPUs: lower num_processes"):
        TorchDistributor(3, True)


def test_a_current_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigurationError, match="current directory no longer exists"):
        on_cpu().run(trainings.rank)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("option", ["log_dir", "working_dir"])
def test_options_that_are_relative_to_a_directory_that_is_gone(
    option: str, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    if local:
        here = on_cpu(**{option: "folder"})
        with pytest.raises(ConfigurationError, match="current directory no longer exists: change to another"):
            here.run(trainings.rank)
    else:
        call = {"log_dir": lambda: make_log_folder(Path("folder"), "3f2a"), "working_dir": lambda: pack(Path("folder"))}
        with pytest.raises(ConfigurationError, match="current directory no longer exists: change to another"):
            call[option]()
    assert make_log_folder(tmp_path, "3f2a") == tmp_path / "3f2a"
    assert pack(tmp_path) is not None


def pack(folder: Path) -> Any:
    return pack_working_dir(Project(working_dir=folder), local=False, view=None)


def test_a_temporary_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    told = f"the temporary folder cannot be used \\(No such file or directory in {tmp_path}/gone\\): make it usable"
    with pytest.raises(ConfigurationError, match=told):
        on_cpu().run(trainings.rank)


def test_no_temporary_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._get_default_tempdir", lambda: os.stat(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match="the temporary folder cannot be used"):
        on_cpu().run(trainings.rank)


@pytest.mark.parametrize("python", ["/no/such/python", "", None])
def test_a_python_that_is_gone(python: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(ConfigurationError, match=f"with sys.executable, but {python!r} is not a program"):
        on_cpu().run(trainings.rank)


def test_platforms_other_than_linux_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match="local mode needs Linux, but this is darwin"):
        on_cpu().run(trainings.rank)


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        ("sys.platform = 'win32'", "distributor needs Linux, but this is Windows: use WSL 2, a container"),
        (
            "sys.version_info = (3, 10, 13)",
            "distributor needs Python 3.11 or later, but this is 3.10.13: start it with another",
        ),
    ],
)
def test_a_python_or_platform_that_does_not_fit(fake: str, says: str) -> None:
    """The command says so in one line; in Python it is the error of the import."""
    command = f"import sys; {fake}; from distributor.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=180, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"distributor: {says}")
    assert len(ended.stderr.splitlines()) == 1
    command = f"import sys; {fake}; from distributor import TorchDistributor"
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=180, check=False)
    assert ended.stderr.splitlines()[-1].startswith(f"ImportError: {says}")


def test_spark_without_java() -> None:
    """One line, and none of Spark's own."""
    ended = subprocess.run(
        [sys.executable, "-m", "distributor", "run", "--master", "local[1]", "--no-gpu", __file__],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("distributor: no Spark session with master local[1]: no Java found (no java on the PATH")


def test_spark_without_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigurationError, match=r"pyspark cannot be imported .* pip install 'distributor\[spark\]'"):
        TorchDistributor(1, False, False).run(trainings.rank)


def test_nothing_was_left_behind() -> None:
    folders, environ = watch.folders(), dict(os.environ)
    with pytest.raises(ConfigurationError):
        on_cpu().run(lambda lock: lock, threading.Lock())
    assert watch.folders() == folders
    assert dict(os.environ) == environ


def test_a_log_dir_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"log_dir '.*file' cannot be used: .* cannot be created: "):
        on_cpu(log_dir=tmp_path / "file").run(trainings.rank)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cpus_per_process": 3}, "cpus_per_process asks for 3 CPUs for each of 2 processes, 6 in all, but this"),
        ({"memory_per_process": "3g"}, "memory_per_process asks for 3,072 MiB of memory for each of 2 processes, 6,"),
        ({"max_processes_per_node": 1}, "num_processes=2 is more than max_processes_per_node=1, and local mode has"),
    ],
)
def test_more_than_this_machine_has(arguments: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.machine.processes.cpu_count", lambda: 4)
    monkeypatch.setattr("distributor.machine.limits.total_memory", lambda: 4 << 30)
    with pytest.raises(ResourceError) as caught:
        TorchDistributor(2, local_mode=True, use_gpu=False, **arguments).run(trainings.rank)
    assert text in str(caught.value)


def test_a_machine_without_loopback() -> None:
    hosts.require()
    command = "from distributor import TorchDistributor; TorchDistributor(1, True, False).run(print)"
    ended = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", command], capture_output=True, text=True, timeout=180, check=False
    )
    assert ended.stderr.splitlines()[-1] == (
        "distributor.errors.ConfigurationError: ranks of one machine talk over loopback, but 127.0.0.1 cannot be "
        "reached here: bring loopback up (ip link set lo up)"
    )
