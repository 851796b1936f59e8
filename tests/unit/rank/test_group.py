"""On which device a process group takes flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributor.checkpoint import exchange
from distributor.rank import group


class OfGpus(dist.ProcessGroup):
    """A group that notes on which devices collectives are asked for."""

    def getBackendName(self) -> str:
        return "of_gpus"


dist.Backend.register_backend("of_gpus", lambda store, rank, size, timeout: OfGpus(rank, size), devices=["cuda"])


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes this process the rank 1 of a node that has a number of GPUs, in a group of its own."""

    def make(backend: str | None, gpus: int = 2, chosen: int = 0) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:of_gpus"])
def test_flags_are_on_the_cpu_where_the_group_serves_it(join: Any, backend: str) -> None:
    join(backend, 0)
    assert group.device() == torch.device("cpu")


@pytest.mark.parametrize("backend", ["of_gpus", "cuda:of_gpus"])
@pytest.mark.parametrize(
    ("gpus", "chosen", "number"),
    [
        pytest.param(2, 0, 1, id="none-chosen"),
        pytest.param(8, 3, 3, id="chosen"),
        pytest.param(1, 0, 0, id="sees-only-its-own"),
    ],
)
def test_flags_are_on_the_ranks_own_gpu_where_it_does_not(
    join: Any, backend: str, gpus: int, chosen: int, number: int
) -> None:
    join(backend, gpus, chosen)
    assert group.device() == torch.device("cuda", number)


def test_a_group_that_names_no_backend_is_of_the_accelerator(join: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``init_process_group()`` on a machine with GPUs."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "cuda", "of_gpus")
    join(None)
    assert dist.get_backend() == "undefined"
    assert group.device() == torch.device("cuda", 1)


def test_a_group_that_is_bound_to_a_device_takes_flags_there(join: Any) -> None:
    join("of_gpus")
    dist.group.WORLD.bound_device_id = torch.device("cuda", 5)
    assert group.device() == torch.device("cuda", 5)


def test_a_connection_outside_a_run_asks_the_group(join: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    join("of_gpus")
    asked: list[Any] = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda told, src, device: asked.append(device))
    exchange.connect_group(0, 2, "ab", "save")
    assert asked == [torch.device("cuda", 1)]
