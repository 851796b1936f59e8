"""GPUs that a run was promised and that are not there: an error before user code runs. No GPU is needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sessions import Sessions

from distributor import Distributor, ResourceError, TorchDistributor
from distributor.launch import MpiEnv
from distributor.machine.devices import local_gpus

pytestmark = pytest.mark.skipif(bool(local_gpus(os.environ)), reason="this machine has GPUs")

SUPPORT = str(Path(__file__).with_name("support"))


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts an ``nvidia-smi`` on the PATH that lists one GPU, or runs another script."""

    def install(script: str = "echo 'GPU 0: NVIDIA T4 (UUID: GPU-8932f937)'") -> None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.mark.parametrize(
    ("visible", "ranks", "words"),
    [
        ("7", 1, r"this machine, the driver, has no visible GPU \(CUDA_VISIBLE_DEVICES=7, nvidia-smi lists 1 GPU\)"),
        ("GPU-1234", 1, r"has no visible GPU \(CUDA_VISIBLE_DEVICES=GPU-1234, nvidia-smi lists 1 GPU\)"),
        ("0,1", 2, r"needs 2 GPUs, but this machine has 1 visible GPU: lower num_processes .* nvidia-smi lists 1 GPU"),
    ],
)
def test_refuses_gpus_that_nvidia_smi_does_not_list(
    nvidia_smi: Any, monkeypatch: pytest.MonkeyPatch, visible: str, ranks: int, words: str
) -> None:
    nvidia_smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ResourceError, match=words):
        TorchDistributor(ranks, True)


def test_the_error_of_nvidia_smi_is_quoted(nvidia_smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi("echo 'NVIDIA-SMI has failed'; exit 9")
    for visible in (None, "0"):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ResourceError, match=r"no visible GPU \(.*smi fails with exit code 9: NVIDIA-SMI has fail"):
            TorchDistributor(1, True)


def test_refuses_more_gpus_per_process_than_there_are(nvidia_smi: Any) -> None:
    nvidia_smi()
    with pytest.raises(ResourceError, match="needs 2 GPUs, but this machine has 1 visible GPU: lower gpus_per_process"):
        TorchDistributor(1, True, gpus_per_process=2)


def touch(path: str) -> None:
    Path(path).touch()


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_refuses_to_train_where_torch_sees_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_method: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(
        ResourceError, match=r"^on \S+: .*torch sees 0 of 2 GPUs \(CUDA_VISIBLE_DEVICES=0,1, there is no"
    ):
        TorchDistributor(2, True, start_method=start_method).run(touch, str(tmp_path / "begun"))
    assert not (tmp_path / "begun").exists()


@pytest.mark.slow
def test_other_frameworks_ask_the_cuda_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ResourceError, match=r"CUDA sees 0 of 1 GPU .* no CUDA driver \(libcuda.so.1\)"):
        Distributor(1, True, launch=MpiEnv()).run(touch, str(tmp_path / "begun"))
    assert not (tmp_path / "begun").exists()


def fake(count: int, tmp_path: Path) -> dict[str, Any]:
    """Options of a run whose ranks find a torch with this number of GPUs."""
    env = {"PYTHONPATH": SUPPORT, "FAKE_GPUS": str(count), "FAKE_GPUS_ASKED": str(tmp_path / "asked")}
    return {"preload": ["fake_cuda"], "env": env}


@pytest.mark.slow
def test_gpus_are_counted_in_processes_that_have_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,GPU-c7384736")
    ranks = TorchDistributor(2, True, **fake(2, tmp_path)).submit(os.getpid).results()
    asked = {int(line) for line in (tmp_path / "asked").read_text().split()}
    assert len(asked) == 2
    assert not asked & {*ranks, os.getpid()}
    assert not any(Path(f"/proc/{pid}").exists() for pid in asked)


@pytest.mark.spark
@pytest.mark.long
def test_executors_check_their_gpus(sessions: Sessions, tmp_path: Path) -> None:
    script = tmp_path / "discover.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["7"]}'\n""")
    script.chmod(0o755)
    settings = {
        f"spark.{who}.resource.gpu.{name}": value
        for who in ("worker", "executor")
        for name, value in (("amount", "1"), ("discoveryScript", str(script)))
    }
    sessions.get("local-cluster[1,1,1024]", **settings, **{"spark.task.resource.gpu.amount": "1"})
    with pytest.raises(ResourceError, match=r"^on \S+: .*torch sees 0 of 1 GPU \(CUDA_VISIBLE_DEV\S+=7"):
        TorchDistributor(1, False).run(touch, str(tmp_path / "begun"))
    assert not (tmp_path / "begun").exists()
