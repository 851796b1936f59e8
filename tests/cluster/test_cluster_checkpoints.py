"""Checkpoints of ranks on three hosts that share a folder."""

from __future__ import annotations

from pathlib import Path

import checkpointed
import pytest
from clusters import Cluster

from distributor import TorchDistributor, TrainingError

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]


def test_a_killed_training_goes_on_bit_by_bit(cluster: Cluster, tmp_path: Path) -> None:
    cluster.session()

    def make(folder: str) -> TorchDistributor:
        return TorchDistributor(3, use_gpu=False, max_processes_per_node=1, checkpoints=tmp_path / folder)

    _, undisturbed, _ = make("undisturbed").run(checkpointed.train_digits, 4)
    distributor = make("killed")
    with pytest.raises(TrainingError, match="killed by SIGKILL"):
        distributor.run(checkpointed.train_digits, 4, str(tmp_path / "once"))
    begun, weights, _ = distributor.run(checkpointed.train_digits, 4, str(tmp_path / "once"))
    assert begun in (1, 2)
    assert weights == undisturbed
