"""What only a real GPU can show; runs wherever one is visible, without Spark."""

from __future__ import annotations

import os

import pytest

from distributor import TorchDistributor
from distributor.machine.devices import local_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not local_gpus(os.environ), reason="no GPU is visible on this machine"),
]


def test_one_rank_with_all_gpus() -> None:
    def train() -> int:
        import torch

        return sum(int(torch.ones(1, device=f"cuda:{index}").item()) for index in range(torch.cuda.device_count()))

    count = len(local_gpus(os.environ))
    assert TorchDistributor(1, local_mode=True, gpus_per_process=count).run(train) == count


def test_tensors_and_models_come_back_on_the_cpu() -> None:
    def train() -> object:
        import torch

        model = torch.nn.Linear(2, 2).cuda()
        return model, torch.ones(3, device="cuda")

    model, tensor = TorchDistributor(1, local_mode=True).run(train)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert tensor.device.type == "cpu"


def test_gpus_are_hidden_where_they_are_not_wanted() -> None:
    def train() -> bool:
        import torch

        return torch.cuda.is_available()

    assert not TorchDistributor(1, local_mode=True, use_gpu=False).run(train)
    assert TorchDistributor(1, local_mode=True).run(train)
