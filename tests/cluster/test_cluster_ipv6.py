"""Hosts that have addresses of IPv6 and no other."""

from __future__ import annotations

import sys
from pathlib import Path

import programs
import pytest
from clusters import Cluster
from hosts import Hosts

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]

#: A driver of its own: a JVM that has begun with IPv4 stays with it.
DRIVER = """
import sys
import trainings
from pyspark.sql import SparkSession
from distributor import TorchDistributor

master, address = sys.argv[1:]
builder = SparkSession.builder.master(master).config("spark.driver.host", address).config("spark.ui.enabled", "false")
builder = builder.config("spark.executor.extraJavaOptions", "-Djava.net.preferIPv6Addresses=true")
spark = builder.config("spark.executor.memory", "512m").config("spark.driver.bindAddress", address).getOrCreate()
run = TorchDistributor(4, use_gpu=False).submit(trainings.all_reduce)
assert run.results() == [10.0] * 4
print(*sorted(node.address for node in run.placement.nodes))
"""


@pytest.mark.long
def test_a_collective_over_ipv6_only(cluster: Cluster, tmp_path: Path) -> None:
    cluster.stop()
    with Hosts(ipv6=True) as hosts:
        env = {**hosts.java_environ(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": hosts.driver_address}
        done = programs.run(tmp_path, DRIVER, hosts.master, f"[{hosts.driver_address}]", env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines()[-1].split() == sorted(hosts.addresses.values())
        assert "[distributor] run" in done.stderr  # over the channel
