"""Launch paths over three hosts: their names mean loopback there, and one has little shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launched
import paths
import psutil
import pytest
import victims
import watch
from clusters import CORES, Cluster
from leftovers import Leftovers

from distributor import Distributor, Run
from distributor.launch import Mpi, TensorFlow

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]


def spread(launch: Any, num_processes: int = 3) -> Distributor:
    return Distributor(num_processes, use_gpu=False, max_processes_per_node=1, launch=launch, grace_period=2)


@pytest.mark.long
def test_jax_over_three_hosts(cluster: Cluster, leftovers: Leftovers) -> None:
    pytest.importorskip("jax")
    cluster.session()
    run = spread("jax").submit(launched.jax_total)
    assert run.results(2 * watch.DEADLINE) == [[6.0, rank, 3, 1] for rank in range(3)]
    leftovers.gone(run.id)


@pytest.mark.long
def test_openmpis_variables_over_three_hosts(cluster: Cluster, leftovers: Leftovers) -> None:
    cluster.session()
    run = spread("mpi-env").submit(launched.by_openmpis_variables)
    assert run.results(2 * watch.DEADLINE) == [[6.0, 0, 1]] * 3
    leftovers.gone(run.id)


@pytest.mark.parametrize("implementation", ["mpich", "openmpi"])
def test_mpi_over_three_hosts(cluster: Cluster, leftovers: Leftovers, implementation: str) -> None:
    pytest.importorskip("mpi4py")
    cluster.session()
    run = spread(Mpi(implementation)).submit(launched.mpi_total)
    assert run.results(2 * watch.DEADLINE) == [[6.0, 6.0, rank, 3, rank] for rank in range(3)]
    leftovers.gone(run.id)


@pytest.mark.parametrize(("implementation", "info"), [("mpich", {}), ("openmpi", {"map_by": "node"})])
def test_mpi_spawns_on_all_hosts(
    cluster: Cluster, leftovers: Leftovers, implementation: str, info: dict[str, str]
) -> None:
    """By default, Open MPI spawns all on the first host, and in the folder of the rank that spawns, if it is there."""
    pytest.importorskip("mpi4py")
    cluster.session()
    run = spread(Mpi(implementation)).submit(launched.add_with_spawned, 4, launched.SPAWNED, "add", **info)
    (total, seen), *_ = run.results(2 * watch.DEADLINE)
    assert total == 7
    assert {host for _, _, host, _ in seen} == {*CORES}
    if implementation == "mpich":
        assert all(folder.startswith(str(cluster.hosts.temporary(host))) for _, _, host, folder in seen)
    leftovers.gone(run.id)


@pytest.mark.long
def test_tensorflow_over_three_hosts(cluster: Cluster, leftovers: Leftovers, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    cluster.session()
    mirrored = spread("tensorflow").submit(launched.mirror)
    assert mirrored.results(2 * watch.DEADLINE) == [[3.0, 3]] * 3
    leftovers.gone(mirrored.id)
    tmp_path.chmod(0o777)
    run = spread(TensorFlow(parameter_servers=1)).submit(launched.train_with_parameter_servers, str(tmp_path), 10)
    assert run.results(2 * watch.DEADLINE) == [10, None, None]
    leftovers.gone(run.id)


def test_ray_over_three_hosts(cluster: Cluster, leftovers: Leftovers) -> None:
    pytest.importorskip("ray")
    cluster.session()
    run = spread(paths.LAUNCHES["ray"]).submit(launched.ray_nodes)
    addresses, cpus = run.result(3 * watch.DEADLINE)
    assert addresses == sorted(cluster.hosts.addresses[host] for host in CORES)
    assert cpus == 3.0
    leftovers.gone(run.id)


#: What is killed on the host of the last node, where neither mpiexec nor a head runs, and what the error says then.
DAEMONS = {
    "mpich": ("hydra_pmi_proxy", victims.COMPANION),
    "openmpi": ("prted", victims.COMPANION),
    "ray": ("raylet", victims.COMPANION),
    "jax": ("", victims.LOST),
    "tensorflow": ("", victims.LOST),
    "mpi-env": ("", victims.LOST),
}

RARE = ("ray", "jax", "tensorflow", "mpi-env")


@pytest.mark.long
@pytest.mark.parametrize("path", [pytest.param(p, marks=[pytest.mark.long] if p in RARE else []) for p in DAEMONS])
def test_a_daemon_of_another_host_is_killed(cluster: Cluster, leftovers: Leftovers, path: str, tmp_path: Path) -> None:
    """A path's own daemon; on paths that have none, the agent."""
    pytest.importorskip(paths.OTHERS[path][0])
    cluster.session()
    tmp_path.chmod(0o777)
    run = spread(paths.LAUNCHES.get(path, path)).submit(paths.training(path), str(tmp_path))
    victims.await_ranks(path, 3, tmp_path)
    assert run.placement is not None
    there = cluster.hosts.processes(run.placement.nodes[-1].host)
    name, text = DAEMONS[path]

    def daemon(run: Run) -> psutil.Process:
        processes = victims.programs(run, name) if name else filter(watch.is_agent, watch.processes(run.id))
        return next(process for process in processes if process.pid in there)

    victims.strike(run, (daemon, text))
    leftovers.gone(run.id)


@pytest.mark.long
def test_ray_trains_on_all_hosts(cluster: Cluster, leftovers: Leftovers, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    cluster.session()
    tmp_path.chmod(0o777)
    distributor = Distributor(sum(CORES.values()), use_gpu=False, launch=paths.LAUNCHES["ray"])
    run = distributor.submit(launched.train_resnet_with_ray, str(tmp_path), len(CORES), spread=True)
    metrics = run.result(6 * watch.DEADLINE)
    launched.assert_trained(metrics, len(CORES))
    assert {worker["address"] for worker in metrics["workers"]} == {cluster.hosts.addresses[host] for host in CORES}
    leftovers.gone(run.id)
