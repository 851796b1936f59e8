"""What a rank finds out about its GPUs before its target runs, without being the process that asks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from distributor.launch.ray import node as ray_node
from distributor.rank import gpus
from distributor.values.environment import CHECK_GPUS


@pytest.fixture(autouse=True)
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs are promised; no driver says anything of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv(CHECK_GPUS, raising=False)
    monkeypatch.setenv("PATH", "")


def test_another_process_answers() -> None:
    answer, pid = gpus.in_fork(lambda: [1, os.getpid()])
    assert answer == 1
    assert pid != os.getpid()
    assert not Path(f"/proc/{pid}").exists()


def fail() -> None:
    raise ValueError("out of order")


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (fail, "^ValueError: out of order$"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "^the process that asked CUDA was killed by SIGKILL$"),
        (lambda: os._exit(3), "^the process that asked CUDA exited with code 3$"),
    ],
)
def test_no_answer_says_why(ask: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        gpus.in_fork(ask)


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_PATIENCE", 0.1)
    with pytest.raises(RuntimeError, match=r"CUDA did not answer within 0.1 s"):
        gpus.in_fork(lambda: time.sleep(600))


def stub(monkeypatch: pytest.MonkeyPatch, count: int, warning: str = "") -> None:
    """A torch that finds some GPUs, and may warn; NVML would list two."""

    def counted() -> int:
        if warning:
            warnings.warn(warning)
        return 2 if "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ else count

    monkeypatch.setattr(torch.cuda, "is_available", lambda: counted() > 0)
    monkeypatch.setattr(torch.cuda, "device_count", counted)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


@pytest.mark.parametrize(
    ("count", "seen"), [(0, "torch sees 0 of 2 GPUs"), (1, "torch sees 1 of 2 GPUs"), (2, None), (8, None)]
)
def test_torch_must_see_as_many_as_the_variable_names(
    monkeypatch: pytest.MonkeyPatch, count: int, seen: str | None
) -> None:
    stub(monkeypatch, count)
    text = gpus.missing(through_torch=True)
    assert text is None if seen is None else seen in str(text)
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_torchs_reason_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, 0, "CUDA initialization:\n The NVIDIA driver on your system is too old")
    assert gpus.missing(through_torch=True) == (
        "use_gpu=True, but torch sees 0 of 2 GPUs (CUDA_VISIBLE_DEVICES=0,1, there is no nvidia-smi, "
        "CUDA initialization: The NVIDIA driver on your system is too old): correct CUDA_VISIBLE_DEVICES, the driver "
        "or torch there, or pass use_gpu=False to train on CPUs"
    )


@pytest.mark.parametrize(("name", "value"), [(CHECK_GPUS, "0"), ("CUDA_VISIBLE_DEVICES", "")])
def test_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """If the user says so, or has hidden all GPUs with ``env=``."""
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpus, "in_fork", fail)
    assert gpus.missing(through_torch=True) is None


DRIVER = """
#include <stdlib.h>
static int number(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }
int cuInit(unsigned flags) { return number("CU_ERROR"); }
int cuDeviceGetCount(int *count) { *count = number("CU_COUNT"); return 0; }
int cuGetErrorName(int error, const char **name) { *name = error == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : 0; return 0; }
"""
LOOK = "import sys; from distributor.rank import gpus; print(gpus.missing(False)); sys.exit('torch' in sys.modules)"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_driver_is_asked_without_torch(tmp_path: Path) -> None:
    """A ``libcuda`` of the test's own answers."""
    (tmp_path / "cuda.c").write_text(DRIVER)
    compiled = ["/usr/bin/env", "PATH=/usr/bin:/bin", "cc", "-shared", "-fPIC", "cuda.c", "-o", "libcuda.so.1"]
    subprocess.run(compiled, cwd=tmp_path, check=True)

    def look(**environ: str) -> str:
        environ |= {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}
        return subprocess.run([sys.executable, "-c", LOOK], env=environ, check=True, stdout=-1, text=True).stdout

    assert look(CU_COUNT="2") == "None\n"
    assert "CUDA sees 1 of 2 GPUs" in look(CU_COUNT="1")
    assert "CUDA's driver reports CUDA_ERROR_SYSTEM_NOT_READY" in look(CU_ERROR="802", CU_COUNT="2")
    assert "CUDA's driver reports 3)" in look(CU_ERROR="3")


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has GPUs")
def test_without_a_driver_only_amds_gpus_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA sees 0 of 2 GPUs" in str(gpus.missing(through_torch=False))
    with pytest.raises(SystemExit, match="CUDA sees 0 of 2 GPUs .*no CUDA driver"):
        ray_node.serve(None, (), "/nowhere", use_gpu=True, ready=fail)
    monkeypatch.setattr("distributor.machine.devices.has_amd", lambda: True)
    assert gpus.missing(through_torch=False) is None
