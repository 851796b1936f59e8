"""Launch paths over three hosts: their names mean loopback there, and one has little shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launched
import pytest
import watch
from clusters import CORES, Cluster

from distributor import Distributor
from distributor.launch import Mpi, Ray, TensorFlow

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]


def spread(launch: Any, num_processes: int = 3) -> Distributor:
    return Distributor(num_processes, use_gpu=False, max_processes_per_node=1, launch=launch, grace_period=2)


def test_jax(cluster: Cluster) -> None:
    pytest.importorskip("jax")
    cluster.session()
    assert spread("jax").submit(launched.jax_total).results(2 * watch.DEADLINE) == [
        [6.0, rank, 3, 1] for rank in range(3)
    ]


def test_openmpis_variables(cluster: Cluster) -> None:
    cluster.session()
    values = spread("mpi-env").submit(launched.by_openmpis_variables).results(2 * watch.DEADLINE)
    assert values == [[6.0, 0, 1]] * 3


@pytest.mark.parametrize("implementation", ["mpich", "openmpi"])
def test_mpi(cluster: Cluster, implementation: str) -> None:
    pytest.importorskip("mpi4py")
    cluster.session()
    values = spread(Mpi(implementation)).submit(launched.mpi_total).results(2 * watch.DEADLINE)
    assert values == [[6.0, 6.0, rank, 3, rank] for rank in range(3)]


def test_tensorflow(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    cluster.session()
    values = spread("tensorflow").submit(launched.mirror).results(2 * watch.DEADLINE)
    assert values == [[3.0, 3]] * 3
    tmp_path.chmod(0o777)
    run = spread(TensorFlow(parameter_servers=1)).submit(launched.serve_or_train, str(tmp_path))
    assert run.results(2 * watch.DEADLINE) == [10.0, None, None]


def test_ray(cluster: Cluster) -> None:
    pytest.importorskip("ray")
    cluster.session()
    run = spread(Ray(object_store_memory="100m")).submit(launched.ray_nodes)
    addresses, cpus = run.result(3 * watch.DEADLINE)
    assert addresses == sorted(cluster.hosts.addresses[host] for host in CORES)
    assert cpus == 3.0
    watch.gone(run.id)
