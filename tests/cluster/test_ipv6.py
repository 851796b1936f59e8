"""Hosts that have addresses of IPv6 and no other."""

from __future__ import annotations

import pytest
import trainings
from conftest import Cluster
from hosts import Hosts

from distributor import TorchDistributor

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]


def test_addresses_of_ipv6(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.stop()
    with Hosts(ipv6=True) as hosts:
        hosts.session()
        run = TorchDistributor(4, use_gpu=False).submit(trainings.all_reduce)
        assert run.results() == [10.0] * 4
        assert run.placement is not None
        assert {node.host: node.address for node in run.placement.nodes} == hosts.addresses
    assert "[distributor] run" in capfd.readouterr().out
