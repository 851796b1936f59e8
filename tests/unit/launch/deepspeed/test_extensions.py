"""What a rank does before DeepSpeed compiles something: who builds, who waits, and what is missing."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributor import StartError
from distributor.launch.deepspeed import extensions
from distributor.launch.deepspeed.extensions import Baton

HOLD = """
import sys
from distributor.launch.deepspeed.extensions import Baton
assert Baton(sys.argv[1], 1).try_acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path: Path) -> str:
    return str(tmp_path / "lock")


def hold(lock: str) -> subprocess.Popen[str]:
    """Another process that builds."""
    builder = subprocess.Popen(
        [sys.executable, "-c", HOLD, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert builder.stdout is not None
    assert builder.stdout.readline() == "held\n"
    return builder


def test_one_builds_at_a_time(lock: str) -> None:
    first, second = Baton(lock, 1), Baton(lock, 1)
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()
    second.release()  # torch does that in an exception handler, too


def test_the_first_build_is_announced(lock: str, capsys: pytest.CaptureFixture[str]) -> None:
    baton = Baton(lock, 1)
    assert baton.try_acquire()
    assert f"building {Path(lock).parent.name} for this node" in capsys.readouterr().err
    baton.release()
    Path(lock).with_name("built.so").touch()
    assert baton.try_acquire()
    assert capsys.readouterr().err == ""
    baton.release()


def test_waiting_ends_with_the_build(lock: str) -> None:
    builder = hold(lock)
    waited = threading.Thread(target=Baton(lock, 60).wait)
    waited.start()
    assert waited.is_alive()
    builder.communicate()
    waited.join(60)
    assert not waited.is_alive()


def test_a_killed_builder_delays_no_other(lock: str) -> None:
    """torch's own lock is a file, which stays when its owner is killed."""
    builder = hold(lock)
    assert not Baton(lock, 1).try_acquire()
    builder.kill()
    builder.communicate()
    Path(lock).touch()  # what torch's own would have left
    Baton(lock, 1).wait()
    assert Baton(lock, 1).try_acquire()


def test_waiting_has_a_deadline(lock: str, capsys: pytest.CaptureFixture[str]) -> None:
    baton = Baton(lock, 1)
    assert baton.try_acquire()
    times = iter([0.0, 100.0, 301.0])
    with pytest.raises(TimeoutError, match=r"has been building in .* for 300 s: wait for it, or pass a longer"):
        Baton(lock, 300, clock=lambda: next(times)).wait()
    assert capsys.readouterr().err.count(f"waiting for another process to build {Path(lock).parent.name}") == 1
    baton.release()


def test_torch_uses_our_lock(lock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.cpp_extension as tools

    monkeypatch.setattr(tools, "FileBaton", tools.FileBaton)
    extensions._set_baton(7)
    assert isinstance(tools.FileBaton(lock, warn_after_seconds=10), Baton)  # as torch calls it


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with all that a build needs, and nothing else."""
    for name in ("c++", "ninja"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_nothing_is_missing(tools: Path) -> None:
    assert extensions.missing_tool(cuda=False) is None


def test_no_compiler(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "c++").unlink()
    missing = extensions.missing_tool(cuda=False)
    assert missing == "there is no C++ compiler 'c++' on the PATH (apt-get install g++; or set CXX to another)"
    monkeypatch.setenv("CXX", "icpx")
    missing = extensions.missing_tool(cuda=False)
    assert missing == "there is no C++ compiler 'icpx' on the PATH (apt-get install g++; CXX names it)"


def test_a_compiler_with_arguments(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ -fno-plt")
    assert extensions.missing_tool(cuda=False) is None
    monkeypatch.setenv("CXX", "")
    assert "there is no C++ compiler ''" in str(extensions.missing_tool(cuda=False))


def test_no_ninja(tools: Path) -> None:
    (tools / "ninja").unlink()
    assert extensions.missing_tool(cuda=False) == "there is no 'ninja' on the PATH (pip install ninja)"


def test_no_nvcc(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    assert "there is no nvcc in the usual folders" in str(extensions.missing_tool(cuda=True))
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tools))
    missing = str(extensions.missing_tool(cuda=True))
    assert f"there is no nvcc in {tools} (install the CUDA toolkit" in missing and "CUDA_HOME" in missing
    (tools / "bin").mkdir()
    (tools / "bin" / "nvcc").touch(0o755)
    assert extensions.missing_tool(cuda=True) is None


def test_ninja_beside_python_is_found(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = tools / "venv"
    beside.mkdir()
    (tools / "ninja").rename(beside / "ninja")
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    extensions._find_ninja()
    assert os.environ["PATH"] == f"{tools}:{beside}"
    extensions._find_ninja()
    assert os.environ["PATH"] == f"{tools}:{beside}"


def test_extensions_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(extensions.cache_folder())
    assert folder.is_dir() and folder.is_relative_to(tmp_path / "cache" / "distributor" / "torch_extensions")
    assert folder == Path(extensions.cache_folder())
    assert folder != Path(extensions.cache_folder("13.0 [(9, 0)]"))
    with monkeypatch.context() as moved:
        moved.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=f"/elsewhere/{name}"))
        assert folder != Path(extensions.cache_folder())
    monkeypatch.setattr(extensions, "_processor", lambda: "another kind of processor")
    assert folder != Path(extensions.cache_folder())


def test_extensions_are_kept_privately_where_there_is_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(extensions.cache_folder())
    parent = tmp_path / f"distributor_cache_{os.geteuid()}"
    assert folder.is_relative_to(parent)
    assert parent.stat().st_mode & 0o777 == 0o700
    parent.chmod(0o777)  # somebody else's trap
    with pytest.raises(
        StartError,
        match="belongs to another user, or other users can access it: remove this folder, or set "
        "TORCH_EXTENSIONS_DIR to another one",
    ):
        extensions.cache_folder()


def test_extensions_that_can_be_kept_nowhere_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(extensions, "_private_parent", lambda: str(tmp_path / "file"))
    with pytest.raises(
        StartError, match="can be kept neither in .* nor in the temporary directory: set TORCH_EXTENSIONS_DIR to a"
    ):
        extensions.cache_folder()


def test_a_configuration_without_deepspeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("torch.utils.cpp_extension.FileBaton", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    extensions.load((), 1, 0)  # without a configuration, whoever needs it will say so
    with pytest.raises(StartError, match=r"there is a deepspeedConfig, but .* cannot import deepspeed .*pip install"):
        extensions.load(("FusedAdamBuilder",), 1, 0)


class Nvml:
    """The library of NVIDIA's driver, on a machine with GPUs of these compute capabilities; CUDA is not asked."""

    def __init__(self, capabilities: list[tuple[int, int]], answer: int = 0) -> None:
        self.capabilities, self.answer, self.users = capabilities, answer, 0

    def nvmlInit_v2(self) -> int:
        self.users += self.answer == 0
        return self.answer

    def nvmlShutdown(self) -> int:
        self.users -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.capabilities)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = 2**40 + index  # a pointer
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.capabilities[device.value - 2**40]
        return 0


AMPERE, HOPPER = (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("nvml", "cuda", "visible", "expected"),
    [
        (Nvml([HOPPER]), "13.0", None, "13.0 [(9, 0)]"),
        (Nvml([AMPERE, AMPERE]), "13.0", "1", "13.0 [(8, 0)]"),
        # Which of them is number 1, CUDA decides.
        (Nvml([HOPPER, AMPERE]), "13.0", "1", "13.0 [(8, 0), (9, 0)] 1"),
        (Nvml([HOPPER]), "13.0", "", ""),
        (Nvml([HOPPER]), "13.0", "-1", ""),
        (Nvml([HOPPER]), None, None, ""),
        (Nvml([]), "13.0", None, ""),
        (Nvml([HOPPER], answer=9), "13.0", None, ""),  # the driver is not loaded
        (SimpleNamespace(), "13.0", None, ""),
        (None, "13.0", None, ""),
    ],
)
def test_machines_with_other_gpus_keep_other_extensions_even_of_the_users_own(
    nvml: Any, cuda: str | None, visible: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: str) -> Any:
        if name != "libnvidia-ml.so.1" or nvml is None:
            raise OSError(f"{name}: cannot open shared object file")
        return nvml

    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda._lazy_init", lambda: pytest.fail("CUDA is initialized"))
    monkeypatch.setattr("torch.utils.cpp_extension.FileBaton", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("TORCH_EXTENSIONS_DIR", None)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(ctypes, "CDLL", library)
    extensions.load((), 1, 0)
    assert os.environ["TORCH_EXTENSIONS_DIR"] == extensions.cache_folder(expected)
    assert getattr(nvml, "users", 0) == 0


def test_an_extension_that_a_device_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("torch.utils.cpp_extension.FileBaton", None)
    with pytest.raises(
        StartError, match="the deepspeedConfig needs DeepSpeed's FusedLamb, which does not exist for 'cpu' devices"
    ):
        extensions.load(("FusedLambBuilder",), 1, 0)
    monkeypatch.setenv("CXX", "/none")
    with pytest.raises(
        StartError, match=r"compiles its cpu_adam on first use, but there is no C\+\+ compiler '/none'.*torch_adam"
    ):
        extensions.load(("CPUAdamBuilder",), 1, 0)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("deepspeed.ops.op_builder.cpu.AsyncIOBuilder.is_compatible", lambda *_, **__: False)
    with pytest.raises(StartError, match="DeepSpeed cannot build its async_io: .*libaio.*apt-get install libaio-dev"):
        extensions.load(("AsyncIOBuilder",), 1, 0)


class Builder:
    """A builder of DeepSpeed's; what loading it does, call by call."""

    name = "answer"

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = list(ends)

    def load(self, verbose: bool) -> None:
        if (end := self.ends.pop(0)) is not None:
            raise end


def test_an_unfinished_build_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports what it has waited for, and takes it for built when it is asked again."""
    import torch.utils.cpp_extension as tools

    monkeypatch.setitem(tools.JIT_EXTENSION_VERSIONER.entries, "answer", object())
    builder = Builder(ImportError("answer.so: cannot open shared object file"), None)
    extensions._build(builder)
    assert builder.ends == [] and "answer" not in tools.JIT_EXTENSION_VERSIONER.entries
    with pytest.raises(ImportError):
        extensions._build(Builder(*(ImportError() for _ in range(3))))
    with pytest.raises(RuntimeError):
        extensions._build(Builder(RuntimeError("Error building extension"), None))
