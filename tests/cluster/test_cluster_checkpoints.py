"""Checkpoints of ranks on three hosts that share a folder."""

from __future__ import annotations

from pathlib import Path

import checkpointed
import pytest
import victims
import watch
from clusters import Cluster

from distributor import TorchDistributor

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]


@pytest.mark.long
@pytest.mark.timeout(6 * watch.DEADLINE)
def test_a_training_goes_on_bit_by_bit_after_a_node_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    """An agent is killed, then an executor."""
    cluster.session()
    options = {"use_gpu": False, "max_processes_per_node": 1}
    undisturbed = TorchDistributor(3, checkpoints=tmp_path / "undisturbed", **options)
    _, weights, _ = undisturbed.run(checkpointed.train_digits, 24)
    kept = tmp_path / "killed"
    killed = TorchDistributor(3, checkpoints=kept, max_restarts=2, grace_period=1.0, **options)
    run = killed.submit(checkpointed.train_digits, 24, pause=0.2)
    for number, (find, step) in enumerate(
        ((lambda: victims.part(run, "agent"), 4), (lambda: victims.executor_of(run), 12))
    ):
        watch.until(lambda step=step: max(checkpointed.committed(kept), default=0) >= step)  # type: ignore[misc]
        find().kill()
        watch.until(lambda number=number: len(run.attempts) > number)  # type: ignore[misc]
    begun, result, _ = run.result(4 * watch.DEADLINE)
    assert begun >= 12
    assert result == weights
    watch.gone(run.id)
