"""DeepSpeed with NCCL: the training functions of the CPU tests, wherever a GPU is visible."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed_trainings as trainings
import pytest

from distributor import DeepspeedTorchDistributor, zero
from distributor.machine.devices import local_gpus

if local_gpus(os.environ):
    pytest.importorskip("deepspeed")  # takes seconds to import, in each process that collects tests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not local_gpus(os.environ), reason="no GPU is visible on this machine"),
]


def make(config: Any) -> DeepspeedTorchDistributor:
    return DeepspeedTorchDistributor(len(local_gpus(os.environ)), 1, True, True, config)


def test_every_stage_learns_as_plain_ddp_does() -> None:
    losses_by_name = make(trainings.config(0)).run(trainings.curves, 100)
    plain = losses_by_name.pop("ddp")
    for name, losses in losses_by_name.items():
        assert losses == pytest.approx(plain, abs=1e-4), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_loaded(precision: str, tmp_path: Path) -> None:
    saved = make(trainings.config(0)).run(trainings.save, str(tmp_path), precision)
    loaded = make(trainings.config(0)).run(trainings.load, str(tmp_path), precision)
    for stage in trainings.STAGES:
        assert loaded[stage]["losses"] == pytest.approx(saved[stage]["losses"], abs=2e-2), stage


def test_ranks_are_forked_although_deepspeed_asks_for_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    """As it is imported; torch would use CUDA for that, after which no process can be forked."""
    assert make(zero(2, micro_batch_size=4, torch_adam=True)).run(int) == 0
    assert "leave that module out" not in capfd.readouterr().err


def test_deepspeeds_own_optimizer_is_built() -> None:
    config = zero(3, precision="fp32", micro_batch_size=4, learning_rate=1e-2)
    result = make(config).run(trainings.with_the_runs_config, 20)
    assert result["losses"][-1] < result["losses"][0]
