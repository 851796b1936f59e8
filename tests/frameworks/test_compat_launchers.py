"""Ray under the names of Databricks and Azure."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from distributor.compat import azureml, trial
from distributor.compat.databricks import air, serverless_gpu

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def on_cpus(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trial.VARIABLE, "2")
    if local:
        monkeypatch.delitem(sys.modules, "pyspark", raising=False)


def workers(times: int) -> list[int]:
    """Has Ray's workers compute; the driver joins the cluster by ray.init()."""
    import ray

    ray.init()
    return _computed(times)


def workers_by_ray_init(times: int) -> list[int]:
    from distributor.compat.databricks.air import ray_init

    ray_init()
    return _computed(times)


def _computed(times: int) -> list[int]:
    import ray

    @ray.remote(num_cpus=1)
    def double(number: int) -> int:
        return 2 * number

    computed: list[int] = ray.get([double.remote(number) for number in range(times)])
    return computed


@pytest.mark.parametrize(
    "launched",
    [
        lambda: serverless_gpu.ray_launch(gpus=8, gpu_type="a10", remote=True)(workers).distributed(3),
        lambda: air.ray_launch(num_accelerators=8)(workers_by_ray_init).distributed(3),
        lambda: [azureml.run(workers, 3, distribution=azureml.RayDistribution(), instance_count=2)],
    ],
    ids=["serverless_gpu", "air", "azureml"],
)
def test_a_function_runs_once_as_rays_driver(launched: Any) -> None:
    assert launched() == [[0, 2, 4]]
