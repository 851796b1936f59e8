"""``spark-submit`` of the example, as docs/clusters.md has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import CORES, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def submit(cluster: Cluster, host: str | None, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs ``spark-submit`` outside the cluster, or on one of its hosts; anywhere but in the project's folder."""
    from pyspark.find_spark_home import _find_spark_home

    cluster.stop()
    address = cluster.hosts.driver_address if host is None else cluster.hosts.addresses[host]
    before = [] if host is None else cluster.hosts.within(host)
    environ = {
        **os.environ,
        "SPARK_LOCAL_IP": address,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_HOME": _find_spark_home(),
    }
    command = [
        *(*before, f"{_find_spark_home()}/bin/spark-submit", "--master", cluster.hosts.master, *options),
        *("--conf", f"spark.driver.host={address}", "--conf", "spark.executor.memory=512m"),
        *("--conf", "spark.ui.enabled=false"),
        *(str(ROOT / "examples" / "spark_submit_job.py"), "--num-processes", "6", "--epochs", "2"),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ, cwd="/")


@pytest.mark.parametrize("host", [None, "host-b"], ids=["outside", "on-a-host"])
def test_client_mode(cluster: Cluster, host: str | None) -> None:
    done = submit(cluster, host)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[distributor] run " in done.stdout
    assert "\naccuracy 0." in done.stdout
    for name in CORES:
        assert f" on {name} ({cluster.hosts.addresses[name]}): rank" in done.stdout


def test_cluster_mode_is_not_for_python_there(cluster: Cluster) -> None:
    """Spark's own limit; should it go, the documentation has to change."""
    done = submit(cluster, None, "--deploy-mode", "cluster")
    assert done.returncode != 0
    assert "Cluster deploy mode is currently not supported for python applications on standalone" in done.stderr
