"""``spark-submit`` of the example, as docs/clusters.md has it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
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
        **{name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")},
        "SPARK_LOCAL_IP": address,
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


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment as venv-pack packs it, but for the gigabytes: these are where they are."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    archive = folder / "env.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "env", arcname=".")
    return archive


@pytest.mark.parametrize(
    "host", [pytest.param(None, marks=pytest.mark.long), "host-b"], ids=["outside", "on-a-host-with-an-environment"]
)
def test_spark_submit_in_client_mode(cluster: Cluster, host: str | None, packed: Path) -> None:
    pythons = ["--conf", f"spark.pyspark.python={sys.executable}"]
    if host is not None:
        driver = ["--conf", f"spark.pyspark.driver.python={sys.executable}"]  # the driver does not unpack it
        pythons = ["--archives", f"{packed}#env", "--conf", "spark.pyspark.python=./env/bin/python", *driver]
    done = submit(cluster, host, *pythons)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[distributor] run " in done.stdout
    assert "\naccuracy 0." in done.stdout
    for name in CORES:
        assert f" on {name} ({cluster.hosts.addresses[name]}): rank" in done.stdout


@pytest.mark.long
def test_sparks_standalone_cluster_mode_refuses_python(cluster: Cluster) -> None:
    """Spark's own limit; should it go, the documentation has to change."""
    done = submit(cluster, None, "--deploy-mode", "cluster")
    assert done.returncode != 0
    assert "Cluster deploy mode is currently not supported for python applications on standalone" in done.stderr
