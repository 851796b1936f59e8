"""Executors of different sizes, several of them on one host, and what the user is told of that."""

from __future__ import annotations

import pytest
import trainings
from clusters import CORES, Cluster

from distributor import StartError, TorchDistributor

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]

NAMES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE")


def layout(run: object) -> list[tuple[str, list[int]]]:
    return [(node.host, list(node.ranks)) for node in run.placement.nodes]  # type: ignore[attr-defined]


@pytest.mark.long
def test_executors_of_different_sizes(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.session()
    run = TorchDistributor(6, use_gpu=False).submit(trainings.environment, *NAMES)
    seen = [tuple(int(env[name] or -1) for name in NAMES) for env in run.results()]
    placed = layout(run)
    assert {host: len(ranks) for host, ranks in placed} == CORES
    expected = []
    for node_rank, (_, ranks) in enumerate(placed):
        expected += [(rank, local, len(ranks), node_rank, 3) for local, rank in enumerate(ranks)]
    assert seen == expected
    words = [
        f"node {node_rank} on {host} ({cluster.hosts.addresses[host]}): "
        + (f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}")
        for node_rank, (host, ranks) in enumerate(placed)
    ]
    lines = capfd.readouterr().err.splitlines()
    assert f"[distributor] run {run.id}: 6 ranks on 3 nodes: {'; '.join(words)}" in lines
    assert str(run.placement) == "; ".join(words)


def test_three_ranks_here_and_one_there(cluster: Cluster) -> None:
    cluster.session({"spark.cores.max": "4"})
    run = TorchDistributor(4, use_gpu=False).submit(trainings.all_reduce)
    assert run.results() == [10.0] * 4
    assert sorted((host, len(ranks)) for host, ranks in layout(run)) == [("host-a", 3), ("host-c", 1)]


@pytest.mark.long
def test_executors_on_one_host_are_nodes(cluster: Cluster) -> None:
    """Three on host-a, one on host-c; those on one host reach the others and each other."""
    cluster.session({"spark.cores.max": "4", "spark.executor.cores": "1"})
    run = TorchDistributor(4, use_gpu=False).submit(trainings.all_reduce)
    assert run.results() == [10.0] * 4
    assert sorted(host for host, ranks in layout(run) if len(ranks) == 1) == ["host-a"] * 3 + ["host-c"]
    interfaces = TorchDistributor(4, use_gpu=False).submit(trainings.environment, "GLOO_SOCKET_IFNAME").results()
    assert sorted(env["GLOO_SOCKET_IFNAME"] or "" for env in interfaces) == ["enp3s0", "eth0", "eth0", "eth0"]


@pytest.mark.long
def test_ranks_of_one_node_at_most(cluster: Cluster) -> None:
    cluster.session()
    run = TorchDistributor(3, use_gpu=False, max_processes_per_node=1).submit(trainings.all_reduce)
    assert run.results() == [6.0] * 3
    assert sorted(layout(run)) == sorted((host, ranks) for host, ranks in layout(run) if len(ranks) == 1)
    with pytest.raises(StartError, match=r"needs 6 task slots at once, at most 2 ranks per executor, .* has 5"):
        TorchDistributor(6, use_gpu=False, max_processes_per_node=2, start_timeout=2).run(trainings.all_reduce)
