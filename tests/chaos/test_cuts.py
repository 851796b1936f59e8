"""Hosts of a real standalone cluster that are cut off: packets vanish, and nobody is told."""

from __future__ import annotations

import os
import time
from pathlib import Path

import faults
import paths
import pytest
import watch
from hosts import Hosts
from leftovers import Leftovers

from distributor import NodeLostError, Run, Status, TorchDistributor, TrainingError

pytestmark = [pytest.mark.chaos, pytest.mark.spark, pytest.mark.slow]

HEARTBEAT = 5


def train(cluster: Hosts, path: str, tmp_path: Path, heartbeat_timeout: float = HEARTBEAT, steps: int = 10**9) -> Run:
    """A run of four ranks that train on two hosts."""
    cluster.session()
    ready = tmp_path / "ready"
    ready.mkdir()
    distributor = paths.distributor(path, 4, False, heartbeat_timeout=heartbeat_timeout, grace_period=2)
    run = distributor.submit(paths.training(path), str(ready), steps)
    watch.until(lambda: len(os.listdir(ready)) == 4 and run.status is Status.RUNNING, 2 * watch.DEADLINE)
    return run


@pytest.mark.long
def test_a_host_that_is_cut_off_ends_by_itself(cluster: Hosts, path: str, tmp_path: Path, leftovers: Leftovers) -> None:
    run = train(cluster, path, tmp_path)
    cluster.cut("host-b")
    with pytest.raises(NodeLostError) as caught:
        run.result(timeout=watch.DEADLINE)
    assert run.placement is not None
    node = next(node for node in run.placement.nodes if node.host == "host-b")
    first, last = node.ranks[0], node.ranks[-1]
    text = f"lost the node on host-b (node {node.node_rank}, ranks {first}-{last}): nothing was heard from it for 5 s"
    assert str(caught.value).startswith(text)
    assert ": 2 ranks running" in str(caught.value)
    leftovers.gone(run.id)


@pytest.mark.long
def test_hosts_that_are_all_cut_off_end_by_themselves(
    cluster: Hosts, path: str, tmp_path: Path, leftovers: Leftovers
) -> None:
    run = train(cluster, path, tmp_path)
    for name in cluster.addresses:
        cluster.cut(name)
    with pytest.raises(NodeLostError, match="host-a .*host-b "):
        run.result(timeout=watch.DEADLINE)
    leftovers.gone(run.id)


@pytest.mark.long
def test_a_failure_is_reported_while_hosts_cannot_reach_each_other(cluster: Hosts, tmp_path: Path) -> None:
    """The launcher beside the rank that fails waits for the store, which is on the other host."""
    cluster.session()
    go = tmp_path / "go"
    run = TorchDistributor(2, False, False, grace_period=2, max_processes_per_node=1).submit(faults.fail_after, str(go))
    watch.until(lambda: all(Path(f"{go}.{rank}").exists() for rank in range(2)), 2 * watch.DEADLINE)
    cluster.part()
    time.sleep(3)  # so that the launcher has asked the store, more than once
    go.touch()
    with pytest.raises(TrainingError, match="^rank 1 on .* failed: ValueError: while the nodes were apart"):
        run.result(timeout=watch.DEADLINE)
    watch.gone(run.id)


@pytest.mark.long
def test_a_short_cut_is_survived(cluster: Hosts, path: str, tmp_path: Path) -> None:
    run = train(cluster, path, tmp_path, heartbeat_timeout=30, steps=400)
    cluster.cut("host-b")
    time.sleep(3)  # the length of the cut
    assert run.status is Status.RUNNING
    cluster.mend("host-b")
    assert run.results(timeout=2 * watch.DEADLINE) == [400] * 4
    watch.gone(run.id)
