"""Trainings with Horovod's names in ranks, and the same trainings in one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

STEPS, BATCH = 4, 8

#: Ways to train that must all come to the same weights as one process.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "adam": {"kind": "Adam"},
    "accumulated": {"passes": 2},
    "predivided": {"predivide": 2.0},
    "summed": {"summed": True},
    "clipped": {"clip": 0.05},
    "fp16": {"fp16": True},
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The whole data: a batch for each step."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(STEPS, BATCH, 3, generator=generator)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.25


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))


def optimizer_of(model: torch.nn.Module, kind: str = "SGD", **given: float) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **given)
    return made


def weights(model: torch.nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def in_one_process(way: dict[str, Any]) -> list[list[float]]:
    """The weights after training with plain torch, with the whole batch in each step."""
    model = model_of(0)
    given = {name: value for name, value in way.items() if name in ("kind", "momentum")}
    optimizer = optimizer_of(model, **given)
    for x, y in zip(*data()):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        if "clip" in way:
            torch.nn.utils.clip_grad_norm_(model.parameters(), way["clip"])
        optimizer.step()
    return weights(model)


def in_ranks() -> dict[str, list[list[float]]]:
    """The weights after each way of training, on this rank. Ranks begin with different weights of their own."""
    from distributor.compat.horovod import torch as hvd

    hvd.init()
    return {name: train(hvd, **way) for name, way in WAYS.items()}


def train(
    hvd: Any,
    passes: int = 1,
    predivide: float = 1.0,
    clip: float | None = None,
    *,
    summed: bool = False,
    fp16: bool = False,
    **given: Any,
) -> list[list[float]]:
    model = model_of(0 if hvd.rank() == 0 else 100 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(
        optimizer_of(model, **given),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none,
        backward_passes_per_step=passes,
        op=hvd.Sum if summed else hvd.Average,
        gradient_predivide_factor=predivide,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scale = passes * (hvd.size() if summed else 1)
    for x, y in zip(*data()):
        optimizer.zero_grad()
        for part in split(x, y, hvd.rank(), hvd.size(), passes):
            (torch.nn.functional.mse_loss(model(part[0]), part[1]) / scale).backward()
        if clip is None:
            optimizer.step()
            continue
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize():
            optimizer.step()
    return weights(model)


def split(
    x: torch.Tensor, y: torch.Tensor, rank: int, size: int, passes: int
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's equal part of a batch, in as many pieces as there are backward passes."""
    own = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return list(zip(x[own].chunk(passes), y[own].chunk(passes)))


def collectives() -> dict[str, Any]:
    """What each collective returns on this rank."""
    from distributor.compat.horovod import torch as hvd

    hvd.init()
    rank = hvd.rank()
    own = torch.tensor([float(rank + 1)])
    inplace = own.clone()
    hvd.allreduce_(inplace, op=hvd.Sum)
    started = hvd.allreduce_async(own, op=hvd.Max)
    waited = hvd.synchronize(started)
    leaf = own.clone().requires_grad_()
    (hvd.allreduce(leaf, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert leaf.grad is not None
    return {
        "average": hvd.allreduce(own).item(),
        "unchanged": own.item(),
        "older": hvd.allreduce(own, average=False).item(),
        "scaled": hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5).item(),
        "min": hvd.allreduce(own, op=hvd.Min).item(),
        "max": waited.item(),
        "done": hvd.poll(started),
        "product": hvd.allreduce(own, op=hvd.Product).item(),
        "integers": hvd.allreduce(torch.tensor([rank])).tolist(),
        "fp16": hvd.allreduce(own, compression=hvd.Compression.fp16).dtype == torch.float32,
        "inplace": inplace.item(),
        "grouped": [each.item() for each in hvd.grouped_allreduce([own, 2 * own])],
        "gradient": leaf.grad.item(),
        "transposed": hvd.allreduce(torch.full((2, 3), float(rank)).t()).tolist(),
        "gathered": hvd.allgather(torch.full((rank + 1, 2), rank)).tolist(),
        "numbers": hvd.allgather(torch.tensor(rank)).tolist(),
        "broadcast": hvd.broadcast(own, root_rank=1).item(),
        "broadcast later": hvd.synchronize(hvd.broadcast_async_(torch.full((2, 3), rank).t(), 1)).tolist(),
        "gathered later": hvd.synchronize(hvd.allgather_async(torch.full((rank + 1,), rank))).tolist(),
        "object": hvd.broadcast_object({"from": rank}, root_rank=1),
        "objects": hvd.allgather_object("ab"[rank]),
        "places": [
            hvd.size(),
            hvd.local_size() * hvd.cross_size(),
            hvd.cross_rank() * hvd.local_size() + hvd.local_rank(),
        ],
        "barrier": hvd.barrier(),
    }


def restored() -> Any:
    """The state of Adam that rank 1 has from steps that the others did not take."""
    from distributor.compat.horovod import torch as hvd

    hvd.init()
    model = model_of(0)
    optimizer = optimizer_of(model, "Adam")
    if hvd.rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.5
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    moments = [float(of_one["exp_avg"].abs().sum()) for of_one in state["state"].values()]
    return optimizer.param_groups[0]["lr"], [float(of_one["step"]) for of_one in state["state"].values()], moments


def scheduled() -> list[float]:
    """The learning rates that this rank has after a scheduler of the user's own optimizer has stepped."""
    from distributor.compat.horovod import torch as hvd

    hvd.init()
    plain = optimizer_of(model_of(0))
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    hvd.broadcast_optimizer_state(optimizer)
    scheduler.step()
    return [optimizer.param_groups[0]["lr"], plain.param_groups[0]["lr"]]


def unused() -> list[float]:
    """Each rank uses a parameter of its own; both ranks train both."""
    from distributor.compat.horovod import torch as hvd

    hvd.init()
    both = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(both, lr=1.0))
    both[hvd.rank()].sum().backward()
    optimizer.step()
    return [parameter.item() for parameter in both]


Training = Callable[[], Any]
