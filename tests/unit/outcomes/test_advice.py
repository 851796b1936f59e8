"""What the driver knows to say about a failure of a rank."""

from __future__ import annotations

import importlib
import socket
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import make_job

from distributor.launch import DeepSpeed
from distributor.outcomes import verdict
from distributor.outcomes.advice import advise
from distributor.values.job import Function, Job, Module, Script, Target, WorkingDir
from distributor.values.outcome import Failure


def failure(kind: str, message: str, host: str = "elsewhere") -> Failure:
    return Failure(0, 0, host, kind, f"{kind}: {message}", exit_code=1, time=time.time() + 60)


def job(target: Target, working_dir: Path | None = None) -> Job:
    return make_job("3f2a", 1, target, False, working_dir=None if working_dir is None else WorkingDir(str(working_dir)))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    for name in ("train.py", "beside.py", "lib/__init__.py", "lib/model.py", "settings.json"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    return folder


def test_a_class_that_is_pickled_by_its_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ``torch.save(model)``, where the class came with the function."""
    monkeypatch.syspath_prepend(str(project))
    ended = failure("PicklingError", "Can't pickle <class 'lib.model.Net'>: import of module 'lib.model' failed")
    assert f"lib is on the driver, in {project}" in advise(ended, job(Function("train", b"")))
    ended = failure("PicklingError", "Can't pickle <function f>: attribute lookup f on lib.model failed")
    assert advise(ended, job(Function("train", b""))) == ""


@pytest.mark.parametrize("module", ["own_lib.model", "own_lib"])
@pytest.mark.parametrize(
    "message",
    [
        "ImportError: cannot import name 'NET' from '{}' (unknown location)",
        "AttributeError: module '{}' has no attribute 'NET'",
    ],
)
def test_a_name_that_has_not_travelled(
    module: str, message: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "lib").rename(project / "own_lib")
    for file in ("__init__", "model"):
        (project / "own_lib" / f"{file}.py").write_text("NET = 1\n")
    monkeypatch.syspath_prepend(str(project))
    importlib.import_module("own_lib.model")
    try:
        kind, _, text = message.format(module).partition(": ")
        advice = advise(failure(kind, text), job(Function("train", b"")))
        assert f"{module} is on the driver, in {project}; ranks have only what the function uses of it" in advice
        assert f"pass working_dir='{project}'" in advice
        assert advise(failure(kind, text), job(Function("train", b""), working_dir=project)) == ""
        assert advise(failure(kind, text.replace("NET", "NONE")), job(Function("train", b""))) == ""
        assert advise(failure(kind, text.replace(module, "json")), job(Function("train", b""))) == ""
    finally:
        del sys.modules["own_lib.model"], sys.modules["own_lib"]


def test_a_module_in_an_archive(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(project / "packed.zip", "w") as archive:
        archive.writestr("packed/__init__.py", "")
    monkeypatch.syspath_prepend(str(project / "packed.zip"))
    ended = failure("ModuleNotFoundError", "No module named 'packed'")
    assert advise(ended, job(Function("train", b""))) == (
        f"packed is in {project / 'packed.zip'} on the driver: give executors the file, too (spark.submit.pyFiles)"
    )


@pytest.mark.parametrize("missing", ["beside", "lib", "lib.model"])
def test_a_module_beside_the_script(project: Path, missing: str) -> None:
    script = Script(str(project / "train.py"), b"")
    ended = failure("ModuleNotFoundError", f"No module named '{missing}'")
    assert advise(ended, job(script)) == (
        f"{missing.partition('.')[0]} is on the driver, in {project}. To ship it to executors, pass "
        f"working_dir={str(project)!r} (--working-dir {project})"
    )
    assert advise(ended, job(script, project)) == ""  # it was shipped


def test_a_module_on_the_drivers_path(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))
    ended = failure("ModuleNotFoundError", "No module named 'lib.model'")
    for target in (Module("lib.train"), Function("train", b"")):
        assert f"lib is on the driver, in {project}" in advise(ended, job(target))


def test_a_module_of_the_current_directory(project: Path, tmp_path: Path) -> None:
    ended = failure("ModuleNotFoundError", "No module named 'lib.model'")
    assert advise(ended, job(Module("lib.model"))) == (
        f"lib is on the driver, in {project}. To ship it to executors, pass working_dir={str(project)!r} "
        f"(--working-dir {project})"
    )
    ended = failure("ModuleNotFoundError", "No module named 'lib.absent'")
    assert advise(ended, job(Module("lib.absent"), tmp_path)) == (
        f"lib.absent is not on the driver either: it is not in working_dir {tmp_path}, the current directory {project} "
        "or on Python's path"
    )
    assert advise(ended, job(Module("lib.model"))) == ""


def test_a_package_that_is_installed_here_only() -> None:
    ended = failure("ModuleNotFoundError", "No module named 'hypothesis'")
    assert advise(ended, job(Module("train"))) == (
        "hypothesis is installed on the driver, but not on elsewhere: install it there, or ship an environment that "
        "has it (spark.archives)"
    )


@pytest.mark.parametrize(
    "message",
    [
        "module 'torch._C' has no attribute '_cuda_setDevice'",
        "Torch not compiled with CUDA enabled",
        "No CUDA GPUs are available",
        "Cannot access accelerator device when none is available.",
        "Unsloth cannot find any torch accelerator? You need a GPU.",
        "Unsloth detected signs of an AMD ROCm GPU, but your current PyTorch build has no usable HIP accelerator.",
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
        "Distributed package doesn't have NCCL built in",
    ],
)
def test_code_that_demands_a_gpu(message: str) -> None:
    ended, on_cpus = failure("AttributeError", message), make_job(target=Module("train"))
    for local in (True, False):
        assert advise(ended, on_cpus, local=local).startswith(
            "The code asks for a GPU, but with use_gpu=False ranks see none"
        )
    assert advise(ended, make_job(target=Module("train"), use_gpu=True)) == ""


def test_code_that_shares_out_no_gpus() -> None:
    traceback = "    local_rank = rank % torch.cuda.device_count()\nZeroDivisionError: integer modulo by zero\n"
    ended = replace(failure("ZeroDivisionError", "integer modulo by zero"), traceback=traceback)
    assert advise(ended, make_job(target=Module("train"))).startswith("The code asks for a GPU")
    assert advise(replace(ended, traceback="    x = 1 // 0\n"), make_job(target=Module("train")), local=True) == ""


@pytest.mark.parametrize("line", ["assert torch.cuda.is_available()", 'assert torch.cuda.is_available(), "for DDP"'])
def test_code_that_asserts_a_gpu(line: str) -> None:
    ended = replace(failure("AssertionError", ""), traceback=f"    {line}\n           ^^^^\nAssertionError\n")
    assert advise(ended, make_job(target=Module("train")), local=True).startswith("The code asks for a GPU")
    assert advise(ended, make_job(target=Module("train"), use_gpu=True), local=True) == ""
    other = replace(ended, traceback="    assert total % world_size == 0\nAssertionError\n")
    assert advise(other, make_job(target=Module("train")), local=True) == ""


def test_device_ids_on_cpus() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="device_ids") as raised:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[0], process_group=object())
    ended = failure("ValueError", str(raised.value))
    told = advise(ended, make_job(target=Module("train")), local=True)
    assert told.startswith("The code passes device_ids to DistributedDataParallel (device_ids is for GPUs)")
    assert advise(ended, make_job(target=Module("train"), use_gpu=True), local=True) == ""


@pytest.mark.parametrize("local", [True, False])
def test_a_torchvision_that_does_not_fit_torch(local: bool) -> None:
    ended = failure("RuntimeError", "operator torchvision::nms does not exist")
    assert advise(ended, make_job(), local=local).startswith("torchvision was built for another torch")
    assert advise(failure("RuntimeError", "operator mine::nms does not exist"), make_job(), local=local) == ""


def test_what_the_launch_path_knows_comes_first() -> None:
    ended = replace(
        failure("exit", "exited with code 2"), log_tail="error: argument --deepspeed: expected one argument"
    )
    told = advise(ended, make_job(launch=DeepSpeed({})), local=True)
    assert told.startswith("The training code parses Hugging Face's TrainingArguments")
    assert advise(ended, make_job()) == ""


@pytest.mark.parametrize(
    ("script", "folder", "module"),
    [
        ("pkg/train.py", "", "pkg.train"),
        ("outer/inner/train.py", "", "outer.inner.train"),
        ("no_init/train.py", "", "no_init.train"),
        ("no_init/pkg/train.py", "no_init", "pkg.train"),
    ],
)
@pytest.mark.parametrize("local", [True, False])
def test_a_script_with_relative_imports_is_to_be_run_as_a_module(
    tmp_path: Path, script: str, folder: str, module: str, local: bool
) -> None:
    for package in ("pkg", "outer", "outer/inner", "no_init/pkg"):
        (tmp_path / package).mkdir(parents=True, exist_ok=True)
        (tmp_path / package / "__init__.py").touch()
    ended = failure("ImportError", "attempted relative import with no known parent package")
    advice = advise(ended, job(Script(str(tmp_path / script), b"")), local=local)
    root = tmp_path / folder
    assert (
        f"pass working_dir={str(root)!r} and call run_module({module!r}) (--working-dir {root} -m {module})" in advice
    )
    assert advise(ended, job(Module("pkg.train")), local=local) == ""


def test_files_of_this_machine_explain_nothing_in_local_mode(project: Path) -> None:
    ended = failure("ModuleNotFoundError", "No module named 'lib.model'")
    assert advise(ended, job(Module("lib.model")), local=True) == ""


def test_a_package_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pip install --target libs``"""
    (tmp_path / "put_lib").mkdir()
    (tmp_path / "put_lib" / "__init__.py").touch()
    (tmp_path / "put_lib-1.0.dist-info").mkdir()
    (tmp_path / "put_lib-1.0.dist-info" / "RECORD").write_text("put_lib/__init__.py,,")
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = failure("ModuleNotFoundError", "No module named 'put_lib'")
    assert advise(ended, job(Function("train", b""))) == (
        f"put_lib is on the driver, in {tmp_path}. To ship it to executors, pass working_dir={str(tmp_path)!r} "
        f"(--working-dir {tmp_path})"
    )


def test_a_file_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").touch()
    sought = "/tmp/distributor-3f2a/script/kernels.py"
    ended = failure("FileNotFoundError", f"[Errno 2] No such file or directory: {sought!r}")
    found = advise(ended, job(Script(str(tmp_path / "train.py"), b"")))
    assert f"kernels.py is on the driver, in {tmp_path}, beside the script." in found
    assert f"pass working_dir={str(tmp_path)!r}" in found


def test_a_file_of_the_current_directory(project: Path, tmp_path: Path) -> None:
    ended = failure("FileNotFoundError", "[Errno 2] No such file or directory: 'settings.json'")
    told = f"settings.json is in the driver's current directory, {project}"
    assert advise(ended, job(Module("train"))) == (
        f"{told}. To ship it to executors, pass working_dir={str(project)!r} (--working-dir {project})"
    )
    assert (
        advise(ended, job(Module("train"), tmp_path))
        == f"{told}, but ranks run in working_dir, {tmp_path}: copy it there"
    )
    assert advise(ended, job(Module("train"), project)) == ""


def test_a_module_that_another_hides(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "click.py").touch()
    ended = failure("ModuleNotFoundError", "No module named 'click.core'; 'click' is not a package")
    assert advise(ended, job(Script(str(project / "train.py"), b""), project)) == ""


def test_a_folder_is_no_module(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "my_data_sets").mkdir()
    (project / "my_data_sets" / "data.csv").touch()
    ended = failure("ModuleNotFoundError", "No module named 'my_data_sets'")
    assert advise(ended, job(Script(str(project / "train.py"), b""))) == ""


def test_a_file_that_has_come_since(project: Path) -> None:
    ended = failure("FileNotFoundError", f"[Errno 2] No such file or directory: {str(project / 'settings.json')!r}")
    assert advise(replace(ended, time=1.0), job(Module("train"))) == ""


def test_a_file_of_the_driver(project: Path) -> None:
    path = str(project / "settings.json")
    text = f"[Errno 2] No such file or directory: {path!r}"
    assert advise(failure("FileNotFoundError", text), job(Module("train"))) == (
        f"{path} is on the driver, but was not found on elsewhere: put it on storage that all hosts share, or into the "
        "project folder that you pass as working_dir="
    )
    assert advise(failure("FileNotFoundError", text, socket.gethostname()), job(Module("train"))) == ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ModuleNotFoundError", "No module named 'no_such_module'"),
        ("ModuleNotFoundError", "No module named 'sys'"),
        ("ModuleNotFoundError", "in words of its own"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'no_such_file'"),
        ("FileNotFoundError", "in words of its own"),
        ("ValueError", "No module named 'beside'"),
    ],
)
def test_other_failures_get_no_advice(project: Path, kind: str, message: str) -> None:
    assert advise(failure(kind, message), job(Script(str(project / "train.py"), b""))) == ""


def test_advice_follows_what_happened() -> None:
    error = verdict.training_error([failure("ValueError", "x")], lambda root: f"look at rank {root.rank}")
    assert str(error).splitlines()[:3] == ["rank 0 on elsewhere failed: ValueError: x", "", "look at rank 0"]
