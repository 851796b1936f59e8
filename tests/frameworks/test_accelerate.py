"""Accelerate's own configuration is honoured, and ranks, ports and threads are those of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sessions import Make

from distributor import ConfigurationError, Distributor
from distributor.launch import Accelerate

pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_machines: 4
machine_rank: 1
num_processes: 32
main_process_ip: 10.0.0.1
main_process_port: 29500
gpu_ids: "4,5"
"""

ON_CPUS = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
mixed_precision: bf16
num_machines: 3
num_processes: 8
use_cpu: true
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(text: str, name: str = "config.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return written


def test_variables_are_those_of_accelerates_launcher(write: Any) -> None:
    path = Accelerate(write(FSDP)).resolve(4, use_gpu=True)
    variables = path.env(True)
    assert (variables["ACCELERATE_USE_FSDP"], variables["FSDP_VERSION"], variables["ACCELERATE_MIXED_PRECISION"]) == (
        "true",
        "2",
        "bf16",
    )
    assert variables["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    ours = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    assert not variables.keys() & set(ours)
    assert all(name.startswith(("ACCELERATE_", "FSDP_")) for name in variables)


def look() -> tuple[int, str, str, Any]:
    import os

    from accelerate import Accelerator

    accelerator = Accelerator()
    return accelerator.num_processes, accelerator.device.type, accelerator.mixed_precision, os.environ["WORLD_SIZE"]


@pytest.mark.ci
@pytest.mark.framework("Accelerate", "accelerate", "launch=Accelerate(file)")
def test_ranks_train_as_the_file_says(make: Make, spread: dict[str, Any], write: Any) -> None:
    run = make(2, launch=Accelerate(write(ON_CPUS)), **spread).submit(look)
    assert run.results() == [(2, "cpu", "bf16", "2")] * 2


def train(steps: int) -> dict[str, Any]:
    """Trains on samples that no other rank has."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    rank = accelerator.process_index
    torch.manual_seed(rank)  # also of the weights: ranks that never meet start, and end, with different ones
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    inputs = torch.randn(16, 4) + rank
    targets = inputs.sum(dim=1, keepdim=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    weights = [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]
    return {"ranks": accelerator.num_processes, "rank": rank, "losses": losses, "weights": weights}


@pytest.mark.ci
@pytest.mark.framework("Accelerate", "accelerate", "Accelerator()")
def test_a_plain_accelerator_trains_one_model(make: Make, spread: dict[str, Any]) -> None:
    zero, one = make(2, require_group=True, **spread).submit(train, 10).results()
    assert [(result["ranks"], result["rank"]) for result in (zero, one)] == [(2, 0), (2, 1)]
    assert zero["losses"] == one["losses"] and all(len(set(losses)) == 2 for losses in zero["losses"])
    assert sum(zero["losses"][-1]) < sum(zero["losses"][0]) / 2
    assert zero["weights"] == one["weights"]


def train_twice(steps: int) -> list[dict[str, Any]]:
    """As in cross-validation: each training has a process group of its own."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    results = []
    for _ in range(2):
        results.append(train(steps))
        Accelerator().end_training()  # leaves the process group
        AcceleratorState._reset_state(reset_partial_state=True)
    return results


@pytest.mark.parametrize("ranks", [2, 8])
def test_two_accelerators_one_after_another(ranks: int, make_local: Make) -> None:
    for first, second in make_local(ranks, require_group=True).submit(train_twice, 3).results():
        assert first == second and first["ranks"] == ranks


def test_accelerates_default_file_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # of another run, perhaps
    assert Distributor(2, True, False, launch="accelerate").submit(look).results()[0][2] == "no"
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(ON_CPUS)
    assert Distributor(2, True, False, launch="accelerate").submit(look).results()[0][2] == "bf16"


def test_the_driver_reads_a_file_for_hardware_it_lacks(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPI of the driver, or hardware for fp8. What the driver exports hides nothing of the file."""
    monkeypatch.setenv("FSDP_VERSION", "2")
    mpi = ON_CPUS + "mpirun_config:\n  mpirun_hostfile: hosts\n  mpirun_ccl: 1\n"
    assert Accelerate(write(mpi)).resolve(2, use_gpu=False).env(False)["ACCELERATE_MIXED_PRECISION"] == "bf16"
    fp8 = Accelerate(write(FSDP.replace("bf16", "fp8"))).resolve(2, use_gpu=True).env(True)
    assert (fp8["ACCELERATE_MIXED_PRECISION"], fp8["FSDP_VERSION"]) == ("fp8", "2")


def test_a_file_for_machines_with_one_gpu_each_may_have_several_ranks_on_a_node(write: Any) -> None:
    one_each = FSDP.replace("FSDP\n", "MULTI_GPU\n", 1).replace("4,5", "0")
    assert Accelerate(write(one_each)).resolve(4, use_gpu=True).env(True)["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_the_users_variables_come_last(write: Any) -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "no"}
    assert Distributor(1, True, False, launch=Accelerate(write(ON_CPUS)), env=env).run(look)[2] == "no"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("text", "use_gpu", "message"),
    [
        pytest.param(FSDP, False, "asks for FSDP, which needs GPUs: pass use_gpu=True, or", id="fsdp-on-cpus"),
        pytest.param(ON_CPUS, True, "says use_cpu: true, but the run has use_gpu=True", id="cpus-on-gpus"),
        pytest.param(
            FSDP.replace("FSDP\n", "DEEPSPEED\n", 1), False, "asks for DeepSpeed: pass launch=", id="deepspeed"
        ),
        pytest.param(
            FSDP.replace("FSDP\n", "XLA\n", 1),
            False,
            "is for XLA, which is not supported",
            id="tpu",
            marks=pytest.mark.long,
        ),
        pytest.param(FSDP + "no_such_key: 1", True, "Accelerate rejects the configuration .*unknown keys", id="key"),
        pytest.param("- 1", True, "Accelerate rejects the configuration ", id="no-mapping", marks=pytest.mark.long),
    ],
)
def test_refuses_an_accelerate_file_that_does_not_suit_the_run(
    text: str, use_gpu: bool, message: str, write: Any
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Accelerate(write(text)).resolve(2, use_gpu)


def test_refuses_a_missing_accelerate_file() -> None:
    with pytest.raises(ConfigurationError, match="there is no Accelerate configuration 'absent.yaml'"):
        Distributor(2, True, False, launch=Accelerate("absent.yaml"))


def test_refuses_when_accelerate_does_not_answer_in_time(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that Accelerate finds by itself has no path that the error could name."""
    monkeypatch.setattr("distributor.launch.accelerate.configuration._PATIENCE", 0.01)
    for launch, name in ((Accelerate(write(ON_CPUS)), "'.*yaml'"), (Accelerate(), "that it found")):
        message = rf"Accelerate did not read the configuration {name} within 0\.01 s: check how long the driver takes"
        with pytest.raises(ConfigurationError, match=message):
            launch.resolve(2, use_gpu=False)
