"""Daemons of the cluster that are killed while ranks train."""

from __future__ import annotations

from pathlib import Path

import pytest
import trainings
import watch
from clusters import Cluster
from hosts import Hosts

from distributor import NodeLostError, Status, TorchDistributor

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]


@pytest.mark.long
def test_a_master_is_not_missed_and_a_worker_is(cluster: Cluster, tmp_path: Path) -> None:
    """Executors live on without the master; with their worker daemon they end, and their ranks with them."""
    cluster.stop()
    with Hosts() as hosts:
        hosts.session()
        distributor = TorchDistributor(4, use_gpu=False, grace_period=2)
        run = distributor.submit(trainings.wait_for, str(tmp_path / "go"))
        watch.until(lambda: run.status is Status.RUNNING, 2 * watch.DEADLINE)
        hosts.kill("master")
        (tmp_path / "go").touch()
        assert run.results(timeout=watch.DEADLINE) == [0, 1, 2, 3]

        run = distributor.submit(trainings.wait_for, str(tmp_path / "never"))
        watch.until(lambda: run.status is Status.RUNNING, 2 * watch.DEADLINE)
        hosts.kill("host-b")
        with pytest.raises(NodeLostError, match="host-b"):
            run.result(timeout=watch.DEADLINE)
        watch.gone(run.id)
