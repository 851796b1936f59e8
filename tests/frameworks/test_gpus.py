"""What only a GPU shows, for the column GPU of docs/frameworks.md: on this machine, a rank on each visible GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed_trainings
import psutil
import pytest

from distributor import DeepspeedTorchDistributor, TorchDistributor, zero
from distributor.machine.devices import local_gpus

#: The GPUs of this machine.
GPUS = local_gpus(os.environ)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="no GPU is visible on this machine"),
]


def on_each(function: Any, *args: Any) -> list[Any]:
    """Returns what the rank on each GPU returns."""
    return TorchDistributor(len(GPUS), True, require_group=None).submit(function, *args).results()


def sums() -> tuple[str, float]:
    """Starts NCCL as the README does, without naming it."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    backends = dist.get_backend_config()  # get_backend() is "undefined"
    dist.destroy_process_group()
    return backends, one.item()


@pytest.mark.framework("PyTorch", "torch", "all-reduce with NCCL", where="GPU")
def test_nccl_starts() -> None:
    for backends, total in on_each(sums):
        assert "cuda:nccl" in backends.split(",")
        assert total == len(GPUS)


def look() -> tuple[int, int, str]:
    """Returns this rank's LOCAL_RANK, the number of the device on which it computes, and which GPU that is."""
    import torch

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    return (
        local_rank,
        torch.ones(1, device="cuda").get_device(),
        str(torch.cuda.get_device_properties(local_rank).uuid),
    )


@pytest.mark.framework("PyTorch", "torch", "LOCAL_RANK is the rank's GPU", where="GPU")
def test_local_rank_is_the_number_of_the_gpu() -> None:
    results = on_each(look)
    assert [result[:2] for result in results] == [(number, number) for number in range(len(GPUS))]
    assert len({gpu for _, _, gpu in results}) == len(GPUS)


def use_the_gpu() -> tuple[int, bool, float]:
    """Returns the process that forked this rank's agent, whether it had used CUDA, and what this rank computes."""
    import torch

    forked_by = psutil.Process().parents()[2]
    assert "warm" in forked_by.cmdline()
    spoilt = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
    return forked_by.pid, spoilt, torch.ones(2, device="cuda").sum().item()


@pytest.mark.framework("PyTorch", "torch", "ranks forked without CUDA", where="GPU")
def test_ranks_are_forked_before_cuda_is_used() -> None:
    first, second = (TorchDistributor(1, True).run(use_the_gpu) for _ in range(2))
    assert first == second
    assert first[1:] == (False, 2.0)


def train_in_shards(steps: int) -> dict[str, Any]:
    """Trains with FSDP2."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(16, 8, device=device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = list(model.parameters())
    return {
        "device": weights[0].device.type,
        "sharded": all(isinstance(weight, DTensor) for weight in weights),
        "losses": losses,
        "weight": weights[0].full_tensor().sum().item(),
    }


@pytest.mark.framework("PyTorch", "torch", "FSDP2", where="GPU")
def test_fsdp2_trains() -> None:
    results = on_each(train_in_shards, 20)
    assert {(result["device"], result["sharded"], result["weight"]) for result in results} == {
        ("cuda", True, results[0]["weight"])
    }
    assert all(result["losses"][-1] < result["losses"][0] / 2 for result in results)


def train_with_the_trainer(folder: str, steps: int) -> dict[str, Any]:
    """Trains with Transformers' Trainer, which is asked for FSDP."""
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=16, **sizes))
    rows = [{"input_ids": [i % 7, 8, 9, 10], "labels": [i % 7, 8, 9, 10]} for i in range(64)]
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    weights = list(trainer.model_wrapped.parameters())
    return {
        "fsdp": trainer.is_fsdp_enabled,
        "device": weights[0].device.type,
        "sharded": all(isinstance(weight, DTensor) for weight in weights),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


@pytest.mark.framework("Transformers", "transformers", "Trainer with FSDP", where="GPU")
def test_the_trainer_trains_with_fsdp(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for result in on_each(train_with_the_trainer, str(tmp_path), 8):
        assert (result["fsdp"], result["device"], result["sharded"]) == (True, "cuda", True)
        assert result["losses"][-1] < result["losses"][0]


@pytest.mark.framework("DeepSpeed", "deepspeed", "ZeRO-3 with offload", where="GPU")
def test_zero_3_trains_with_offload() -> None:
    pytest.importorskip("deepspeed")
    config = zero(3, "cpu", "fp32", micro_batch_size=4, learning_rate=1e-2)
    distributor = DeepspeedTorchDistributor(len(GPUS), 1, True, True, config)
    for result in distributor.submit(deepspeed_trainings.with_the_runs_config, 20).results():
        section = result["config"]["zero_optimization"]
        assert (result["stage"], section["offload_param"]["device"], section["offload_optimizer"]["device"]) == (
            3,
            "cpu",
            "cpu",
        )
        assert result["losses"][-1] < result["losses"][0]
