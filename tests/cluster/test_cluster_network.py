"""Collectives between hosts whose names mean loopback and whose interfaces have odd names; slow and split networks."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trainings
from clusters import CORES, Cluster
from hosts import INTERFACES, Hosts

from distributor import TorchDistributor

sys.path.append(str(Path(__file__).parents[2] / "examples"))

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]


@pytest.mark.ci
def test_digits_over_three_hosts_as_on_one_machine(cluster: Cluster) -> None:
    import digits
    import torch

    cluster.session()
    alone = TorchDistributor(3, local_mode=True, use_gpu=False).run(digits.train, epochs=10)
    run = TorchDistributor(3, use_gpu=False, max_processes_per_node=1).submit(digits.train, epochs=10)
    spread = run.result()
    assert run.placement is not None
    assert {node.host for node in run.placement.nodes} == set(CORES)
    assert spread["accuracy"] == pytest.approx(alone["accuracy"], abs=0.005)
    assert spread["accuracy"] > 0.9
    for name, weights in alone["weights"].items():
        torch.testing.assert_close(spread["weights"][name], weights, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_each_node_uses_its_way_to_the_others(cluster: Cluster) -> None:
    """Not the interface that its name leads to (loopback), nor the one that is there on every host (Docker's)."""
    cluster.session()
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MASTER_ADDR")
    run = TorchDistributor(6, use_gpu=False).submit(trainings.environment, *names)
    seen = run.results()
    assert run.placement is not None
    interfaces = dict(zip(CORES, INTERFACES))
    for node in run.placement.nodes:
        for rank in node.ranks:
            used = interfaces[node.host]
            master = cluster.hosts.addresses[run.placement.master.host]
            assert tuple(seen[rank][name] for name in names) == (used, f"={used}", used, master)


def ask_for_name(address: str) -> None:
    """Asks the rank's own resolver for the name of an address; an answer need not come."""
    with suppress(socket.gaierror):
        socket.getnameinfo((address, 0), socket.NI_NUMERICSERV)


@pytest.mark.long
def test_no_name_server_is_asked_for_the_names_of_peers(cluster: Cluster) -> None:
    """One that never answers would cost each rank 5 s or more; what ranks ask it themselves still reaches it."""
    cluster.session()
    hosts = list(CORES)
    with ExitStack() as stack:
        names = [stack.enter_context(cluster.hosts.dead_name_server(host)) for host in hosts]
        TorchDistributor(6, use_gpu=False).run(trainings.rank)  # Java asks for its host's name as executors start
        before = [len(asked()) for asked in names]

        def since() -> list[set[str]]:
            return [set(asked()[known:]) for asked, known in zip(names, before, strict=True)]

        for start_method in ("fork", "spawn"):
            run = TorchDistributor(6, use_gpu=False, start_method=start_method).submit(trainings.all_reduce)
            assert run.results() == [21.0] * 6
            assert since() == [set()] * len(hosts)
        TorchDistributor(6, use_gpu=False).run(ask_for_name, "10.1.2.3")
        assert since() == [{"3.2.1.10.in-addr.arpa"}] * len(hosts)


def test_little_shared_memory_of_a_host_is_warned_of(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.session()
    TorchDistributor(6, use_gpu=False).run(trainings.rank)
    warnings = [record.getMessage() for record in caplog.records if "/dev/shm" in record.getMessage()]
    assert [text.partition(",")[0] for text in warnings] == ["the node on host-b has 64 MiB of /dev/shm"]


@pytest.mark.long
def test_variables_for_interfaces_are_respected(cluster: Cluster) -> None:
    cluster.session({"spark.executorEnv.NCCL_SOCKET_IFNAME": "ib0", "spark.executorEnv.NCCL_IB_HCA": "mlx5_1"})
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "TP_SOCKET_IFNAME")
    run = TorchDistributor(6, use_gpu=False, env={"TP_SOCKET_IFNAME": "mine"})
    for seen in run.submit(trainings.environment, *names).results():
        assert seen["GLOO_SOCKET_IFNAME"] in INTERFACES
        assert (seen["NCCL_SOCKET_IFNAME"], seen["NCCL_IB_HCA"], seen["TP_SOCKET_IFNAME"]) == ("ib0", "mlx5_1", "mine")


@pytest.mark.long
def test_the_drivers_network_need_not_join_the_hosts(cluster: Cluster) -> None:
    cluster.stop()
    with Hosts(separate=True) as hosts:
        hosts.session()
        run = TorchDistributor(4, use_gpu=False).submit(trainings.all_reduce)
        assert run.results() == [10.0] * 4
        assert run.placement is not None
        assert {node.host: node.address for node in run.placement.nodes} == hosts.addresses
