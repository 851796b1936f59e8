"""Ranks of several executors on one host that are numbered together, for libraries that coordinate by host."""

from __future__ import annotations

import os
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from driver import driven
from sessions import Sessions

from distributor import ConfigurationError, TorchDistributor, TrainingError, runtime

#: What ranks are told of their place.
NAMES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")


def look() -> tuple[int, ...]:
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    assert (runtime.local_rank(), runtime.local_world_size()) == (
        int(os.environ["LOCAL_RANK"]),
        int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    return tuple(int(os.environ[name]) for name in NAMES)


@pytest.mark.long
def test_ranks_of_two_nodes_on_one_host_are_numbered_together() -> None:
    with driven(look, num_processes=3, local_ranks="host") as driver:
        assert driver.values() == [(rank, rank, 3, 0, 0, 1) for rank in range(3)]
    with driven(look, num_processes=3) as driver:
        assert driver.values() == [(0, 0, 2, 0, 0, 2), (1, 1, 2, 0, 0, 2), (2, 0, 1, 1, 1, 2)]


def coordinate(name: str) -> Any:
    """As mosaicml-streaming does: who is first on its host makes shared memory for the others."""
    dist.init_process_group("gloo")
    memory = SharedMemory(name, create=True, size=8) if runtime.local_rank() == 0 else None
    dist.barrier()
    if memory is not None:
        memory.close()
        memory.unlink()
    dist.destroy_process_group()


@pytest.mark.spark
@pytest.mark.long
def test_a_collision_of_local_ranks_is_explained(sessions: Sessions) -> None:
    sessions.get("local-cluster[2,1,1024]")
    name = f"{os.getpid() % 1_000_000:06}_locals"
    with pytest.raises(TrainingError, match=r'pass local_ranks="host" \(--local-ranks host\)'):
        TorchDistributor(2, False, False).run(coordinate, name)
    TorchDistributor(2, False, False, local_ranks="host").run(coordinate, name)


def test_refuses_local_ranks_by_host_with_gpus() -> None:
    with pytest.raises(ConfigurationError, match="local_ranks='host' is for ranks on CPUs"):
        TorchDistributor(2, True, True, local_ranks="host")


def import_streaming(folder: str) -> None:
    import sys

    sys.path.insert(0, folder)
    __import__("streaming")


@pytest.mark.parametrize(
    ("source", "options", "warned"),
    [
        pytest.param("class StreamingDataset: ...", {}, {0, 2}, id="two-nodes"),
        pytest.param("class StreamingDataset: ...", {"local_ranks": "host"}, set(), id="numbered-by-host"),
        pytest.param("class StreamingDataset: ...", {"nodes": 1}, set(), id="one-node"),
        pytest.param("own = True", {}, set(), id="a-module-of-the-users"),
    ],
)
@pytest.mark.long
def test_a_library_that_coordinates_by_host_is_warned_of(
    source: str, options: dict[str, Any], warned: set[int], tmp_path: Path
) -> None:
    """By each rank that is the first of its node."""
    (tmp_path / "streaming.py").write_text(source)
    with driven(import_streaming, str(tmp_path), num_processes=3, **options) as driver:
        driver.result()
    warning = (
        b"[distributor] streaming expects one LOCAL_RANK 0 on each host, but 2 executors of this run share this host"
    )
    assert {rank for (rank, stream), text in driver.logs.items() if stream == 2 and warning in text} == warned
