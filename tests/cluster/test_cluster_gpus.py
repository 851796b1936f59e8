"""GPUs as Spark hands them out, without any: discovery scripts report numbers and UUIDs."""

from __future__ import annotations

import os

import pytest
import trainings
from clusters import CORES, ENVIRON, GPUS, Cluster

from distributor import ConfigurationError, ResourceError, TorchDistributor

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]

#: Executors with GPUs, whose tasks have none by default.
WITH_GPUS = {"spark.executor.resource.gpu.amount": "3", "spark.task.cpus": "1"}


def visible() -> tuple[str, str, list[str]]:
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return os.environ["LOCAL_RANK"], os.environ["HIP_VISIBLE_DEVICES"], gpus


def devices_of(host: str) -> list[str]:
    """What ranks on a host have to call its GPUs: numbers go through the setting that the host has already."""
    environ = ENVIRON.get(host, {})
    names = (environ.get("CUDA_VISIBLE_DEVICES") or environ.get("HIP_VISIBLE_DEVICES") or "").split(",")
    return [names[int(name)] if name.isdecimal() else name for name in GPUS[host]]


@pytest.mark.long
def test_a_run_may_have_gpus_where_tasks_have_none(cluster: Cluster) -> None:
    cluster.session(WITH_GPUS)
    run = TorchDistributor(6).submit(visible)
    results = run.results()
    assert run.placement is not None
    for node in run.placement.nodes:
        for rank in node.ranks:
            local_rank, hip, gpus = results[rank]
            assert ",".join(gpus) == hip == ",".join(node.gpus)
            assert len(gpus) == len(set(gpus)) == CORES[node.host]
            assert set(gpus) <= set(devices_of(node.host))
            assert gpus[int(local_rank)]  # cuda:LOCAL_RANK is there
    rocr = TorchDistributor(6).submit(trainings.environment, "ROCR_VISIBLE_DEVICES").results()  # filters below HIP's
    assert [env["ROCR_VISIBLE_DEVICES"] for env in rocr].count(ENVIRON["host-a"]["ROCR_VISIBLE_DEVICES"]) == 3
    hidden = TorchDistributor(6, use_gpu=False).submit(visible).results()
    assert {tuple(gpus) for _, _, gpus in hidden} == {("",)}


@pytest.mark.long
def test_several_gpus_for_each_rank(cluster: Cluster) -> None:
    cluster.session(WITH_GPUS)
    run = TorchDistributor(3, gpus_per_process=3).submit(visible)
    results = run.results()
    assert run.placement is not None
    assert {node.host for node in run.placement.nodes} == set(CORES)
    for node in run.placement.nodes:
        assert sorted(results[node.first_rank][2]) == sorted(devices_of(node.host))
    with pytest.raises(ResourceError, match=r"gpus_per_process=4, but spark\.executor\.resource\.gpu\.\S+ gives .* 3"):
        TorchDistributor(1, gpus_per_process=4).run(visible)


@pytest.mark.long
def test_tasks_that_share_gpus(cluster: Cluster) -> None:
    """As clusters for queries have it; PySpark's distributor cannot even read it."""
    cluster.session({**WITH_GPUS, "spark.task.resource.gpu.amount": "0.5"})
    with pytest.raises(ConfigurationError, match=r"is 0\.5: ranks cannot share a GPU .* gpus_per_process=1"):
        TorchDistributor(2).run(visible)
    run = TorchDistributor(2, gpus_per_process=1).submit(visible)
    assert all(gpus[int(local_rank)] for local_rank, _, gpus in run.results())
