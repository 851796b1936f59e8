"""Hosts of a real standalone cluster that are cut off: packets vanish, and nobody is told."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trainings
import watch
from hosts import Hosts

from distributor import NodeLostError, Run, Status, TorchDistributor

pytestmark = [pytest.mark.chaos, pytest.mark.spark, pytest.mark.slow]

HEARTBEAT = 5


def train(cluster: Hosts, tmp_path: Path, heartbeat_timeout: float = HEARTBEAT, steps: int = 10**9) -> Run:
    """A run of four ranks that train on two hosts."""
    cluster.session()
    ready = tmp_path / "ready"
    ready.mkdir()
    distributor = TorchDistributor(4, use_gpu=False, heartbeat_timeout=heartbeat_timeout, grace_period=2)
    run = distributor.submit(trainings.train_on, str(ready), steps)
    watch.until(lambda: len(os.listdir(ready)) == 4 and run.status is Status.RUNNING, 2 * watch.DEADLINE)
    return run


def test_a_host_that_is_cut_off_ends_by_itself(cluster: Hosts, tmp_path: Path) -> None:
    run = train(cluster, tmp_path)
    cluster.cut("host-b")
    start = time.monotonic()
    with pytest.raises(NodeLostError) as caught:
        run.result(timeout=2 * watch.DEADLINE)
    assert time.monotonic() - start < HEARTBEAT + watch.FAILURE_DEADLINE + 2  # the grace of the ranks on host-a
    text = str(caught.value)
    assert text.startswith(f"lost the node on host-b (node 1, ranks 2-3): nothing was heard from it for {HEARTBEAT} s")
    assert "2 ranks running, rank 2 wrote '" in text
    watch.gone(run.id, HEARTBEAT + watch.ORPHAN_DEADLINE)
    assert time.monotonic() - start < HEARTBEAT + watch.ORPHAN_DEADLINE


def test_hosts_that_are_all_cut_off_end_by_themselves(cluster: Hosts, tmp_path: Path) -> None:
    run = train(cluster, tmp_path)
    for name in cluster.addresses:
        cluster.cut(name)
    start = time.monotonic()
    with pytest.raises(NodeLostError, match="host-a .*host-b "):
        run.result(timeout=2 * watch.DEADLINE)
    watch.gone(run.id, HEARTBEAT + watch.ORPHAN_DEADLINE)
    assert time.monotonic() - start < HEARTBEAT + watch.ORPHAN_DEADLINE


def test_a_short_cut_is_survived(cluster: Hosts, tmp_path: Path) -> None:
    run = train(cluster, tmp_path, heartbeat_timeout=30, steps=400)
    cluster.cut("host-b")
    cut = time.monotonic()
    watch.until(lambda: time.monotonic() - cut > 3)  # the length of the cut
    assert run.status is Status.RUNNING
    cluster.mend("host-b")
    assert run.results(timeout=2 * watch.DEADLINE) == [400] * 4
    watch.gone(run.id)
