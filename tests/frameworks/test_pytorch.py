"""PyTorch's own ways to train: DDP, FSDP2 with distributed checkpoints, tensor and hybrid sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import watch
from sessions import LOCAL, Make

pytestmark = [pytest.mark.slow, pytest.mark.framework("PyTorch", "torch")]


def perceptron(steps: int) -> list[float]:
    """Trains on the digits with DDP; the mean loss of the first and of the last steps, over all ranks."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    loader = DataLoader(data, 64, sampler=DistributedSampler(data))
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses: list[float] = []
    while len(losses) < steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
    return [sum(losses[:5]) / 5, sum(losses[-5:]) / 5]


@pytest.mark.ci
def test_ddp_trains_a_perceptron(make: Make) -> None:
    first, last = make(2).run(perceptron, 60)
    assert last < first / 4


def transformer(steps: int, save_every: int) -> dict[str, Any]:
    """Trains ten million parameters, sharded by FSDP2. Saves a distributed checkpoint now and then, to a relative path.

    Goes on from the newest one, whatever number of ranks has written it.
    """
    import os
    from pathlib import Path

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(2048, 256), torch.nn.TransformerEncoder(layer, 12), torch.nn.Linear(256, 2048)
    )
    for block in model[1].layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(1)
    tokens = torch.randint(2048, (4, 17))  # the same on each rank, so that the number of ranks does not matter

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    done = max((int(path.name) for path in Path("ckpt").glob("[0-9]*") if (path / ".metadata").exists()), default=0)
    if done:
        kept = state()
        dcp.load(kept, checkpoint_id=f"ckpt/{done}")
        set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
    losses = []
    for step in range(done + 1, done + steps + 1):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
        if step % save_every == 0:
            dcp.save(state(), checkpoint_id=f"ckpt/{step}")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "from": done,
        "losses": losses,
        "files": len(os.listdir(f"ckpt/{done + steps}")),
        "local": sum(parameter.to_local().numel() for parameter in model.parameters()),
    }


def test_fsdp_checkpoints_are_loaded_by_another_number_of_ranks(
    make: Make, spread: dict[str, Any], tmp_path: Path
) -> None:
    """With ``output_dir``, shards of all nodes come together, and every node gets them all."""
    for name in ("work", "whole"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {"working_dir": tmp_path / "work", "output_dir": tmp_path / "out", "output_limit": "4g"}
    first = make(2, **options, **spread).run(transformer, 10, 5)
    assert first["parameters"] > 10_000_000
    assert first["local"] < 0.6 * first["parameters"]
    assert (first["from"], len(list((tmp_path / "out/ckpt/10").iterdir()))) == (0, 3)
    more = make(3, **options).run(transformer, 5, 5)
    whole = make(1, working_dir=tmp_path / "whole").run(transformer, 15, 15)
    assert more["from"] == 10
    assert more["losses"] == pytest.approx(whole["losses"][10:], rel=0.05)
    assert more["losses"][0] < first["losses"][0] / 1.5


def hybrid() -> dict[str, Any]:
    """Shards over the ranks of a node, and replicates over nodes: by LOCAL_RANK and LOCAL_WORLD_SIZE."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (dist.get_world_size() // local, local), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return {
        "mesh": tuple(mesh.shape),
        "shard": mesh.get_local_rank("shard") == int(os.environ["LOCAL_RANK"]),
        "weight": model[0].weight.full_tensor().sum().item(),
    }


def tensor_parallel() -> float:
    """Splits two layers over the ranks of a node; the difference to the same layers on one rank."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (dist.get_world_size() // local, local), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    x = torch.randn(4, 32)
    expected = model(x)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return float((model(x) - expected).abs().max())


def test_hybrid_sharding_over_the_ranks_of_each_executor(make: Make, mode: str) -> None:
    results = make(4).submit(hybrid).results(watch.DEADLINE)
    assert {result["mesh"] for result in results} == {(1, 4) if mode == LOCAL else (2, 2)}
    assert all(result["shard"] for result in results)
    assert len({round(result["weight"], 4) for result in results}) == 1


def test_tensor_parallel_layers(make: Make) -> None:
    assert max(make(4).submit(tensor_parallel).results(watch.DEADLINE)) < 1e-5
