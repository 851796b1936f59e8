"""Ray and TensorFlow under the names of Databricks and Azure."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from distributor.compat import azureml, trial
from distributor.compat.databricks import air, serverless_gpu

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


def workers_at_once(times: int) -> list[int]:
    """As public notebooks do it: the function finds itself joined to the cluster."""
    import ray

    assert ray.cluster_resources()["CPU"] >= 2
    return _computed(times)


def _computed(times: int) -> list[int]:
    import ray

    @ray.remote(num_cpus=1)
    def double(number: int) -> int:
        return 2 * number

    computed: list[int] = ray.get([double.remote(number) for number in range(times)])
    return computed


@pytest.mark.ci
@pytest.mark.parametrize(
    "launched",
    [
        pytest.param(
            lambda: serverless_gpu.ray_launch(gpus=8, gpu_type="a10", remote=True)(workers).distributed(3),
            id="serverless_gpu",
        ),
        pytest.param(
            lambda: serverless_gpu.ray_launch(gpus=8)(workers_at_once).distributed(3),
            id="at once",
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda: air.ray_launch(num_accelerators=8)(workers_by_ray_init).distributed(3),
            id="air",
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda: [azureml.run(workers, 3, distribution=azureml.RayDistribution(), instance_count=2)],
            id="azureml",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_function_runs_once_as_rays_driver(launched: Any) -> None:
    pytest.importorskip("ray")
    assert launched() == [[0, 2, 4]]


def cluster() -> Any:
    """The cluster and the task of a process, as TensorFlow reads them; servers serve until they are stopped."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
    return {kind: len(tasks) for kind, tasks in resolver.cluster_spec().as_dict().items()}


@pytest.mark.ci
def test_azures_tensorflow_has_a_chief_workers_and_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    monkeypatch.delenv(trial.VARIABLE)
    asked = azureml.TensorFlowDistribution(parameter_server_count=1, worker_count=3)
    assert azureml.run(cluster, distribution=asked, use_gpu=False) == {"chief": 1, "worker": 2, "ps": 1}
