"""Names of Databricks' launchers: what their arguments ask for, what is refused, and how GPUs are checked."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from distributor import ConfigurationError, ResourceError
from distributor.compat import trial
from distributor.compat.databricks import air, decorated, serverless_gpu
from distributor.compat.databricks.air import launching as air_launching
from distributor.compat.databricks.serverless_gpu import (
    compute,
    data as serverless_data,
    launcher,
    launching,
    ray as serverless_ray,
    runtime,
)
from distributor.compat.refused import REFUSED
from distributor.launch import Ray, Torchrun


def one() -> int:
    return 1


def test_arguments_of_the_first_generation() -> None:
    asked = launching.request("distributed", Torchrun(), 8, "h100", True)
    assert (asked.processes, asked.accelerator, asked.local_mode, asked.use_gpu) == (8, "H100", False, True)
    assert asked.asked == "@distributed(gpus=8, gpu_type='h100', remote=True)"
    asked = launching.request("distributed", Torchrun(), 1, compute.GPUType.A10, False)
    assert (asked.asked, asked.local_mode) == ("@distributed(gpus=1, gpu_type=GPUType.A10, remote=False)", True)
    everything = launching.request("distributed", Torchrun(), None, None, None)
    assert (everything.processes, everything.accelerator, everything.local_mode) == (None, None, None)


def test_arguments_of_the_second_generation() -> None:
    asked = air_launching.request("distributed", Torchrun(), 2, "GPU_8xH100")
    assert (asked.processes, asked.accelerator, asked.local_mode) == (2, "H100", None)
    assert air_launching.request("distributed", Torchrun(), None, "GPU_8xH100").processes == 8
    assert air_launching.request("distributed", Torchrun(), None, None).processes is None


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: serverless_gpu.distributed(gpus=0), "gpus must be a positive integer, not 0"),
        (lambda: serverless_gpu.distributed(gpu_type="H 100"), "gpu_type must be the name of a GPU model.*not 'H 100'"),
        (lambda: serverless_gpu.distributed(gpu_type=100), "gpu_type must be the name of a GPU model"),
        (lambda: serverless_gpu.distributed(remote="pool"), "remote must be True, False or None, not 'pool'"),
        (lambda: serverless_gpu.distributed(one), r"@distributed needs parentheses: write @distributed\(\) above one"),
        (lambda: serverless_gpu.ray_launch(one), r"@ray_launch needs parentheses"),
        (lambda: air.distributed(one), r"@distributed needs parentheses"),
        (lambda: serverless_gpu.distributed(gpus=2)("train.py"), r"@distributed\(gpus=2\) decorates a function, not"),
        (lambda: air.distributed(num_accelerators=-1), "num_accelerators must be a positive integer, not -1"),
        (lambda: air.distributed(accelerator_type="H100"), "accelerator_type must be .* such as 'GPU_8xH100'.*'H100'"),
        (lambda: air.distributed(accelerator_type=8), "accelerator_type must be a number and a GPU model"),
        (lambda: air.ray_init(), r"ray_init\(\) joins the Ray cluster of a run, but this process does not belong"),
    ],
)
def test_wrong_arguments_of_the_decorators(call: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        call()


@pytest.mark.parametrize("name", REFUSED["databricks.air.data"][1])
def test_data_loaders_of_databricks_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"databricks.air.data.{name} needs Databricks' services.*: use torch"):
        getattr(air.data, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        air.data.no_such_name


@pytest.mark.parametrize("name", ["UCVolumeReader", "UCVolumeWriter"])
def test_data_of_the_first_generation_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"^serverless_gpu.data.{name} needs Databricks' services.*: use torch"
    ):
        getattr(serverless_data, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        serverless_data.no_such_name


def test_the_decorator_is_in_a_module_of_its_own_too() -> None:
    assert launcher.distributed is serverless_gpu.distributed


def test_only_variables_of_mlflow_are_carried() -> None:
    assert decorated.carried({"MLFLOW_RUN_ID": "7", "AWS_SECRET_ACCESS_KEY": "s"}) == {"MLFLOW_RUN_ID": "7"}


def test_a_decorated_function_still_runs_here() -> None:
    decorated_one = serverless_gpu.distributed(gpus=2)(one)
    assert decorated_one() == 1
    assert decorated_one.__name__ == "one"


async def later(number: int) -> int:
    return number


@pytest.mark.parametrize(
    ("function", "given", "told"),
    [
        (one, (1, 2), r"one\(\) cannot be called with these arguments: too many positional arguments"),
        (later, (1,), "later is a coroutine function, and calling it runs nothing"),
    ],
)
@pytest.mark.parametrize("launched", [serverless_gpu.ray_launch(gpus=1), air.ray_launch(num_accelerators=1)])
def test_wrong_arguments_of_rays_driver_are_told_at_once(launched: Any, function: Any, given: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        launched(function).distributed(*given)


def test_ray_launch_asks_for_rays_path() -> None:
    for made in (serverless_gpu.ray_launch(gpus=4)(one), air.ray_launch(num_accelerators=4)(one)):
        assert isinstance(made._request.launch, Ray)
        assert made._request.processes == 4
    assert serverless_ray.ray_launch is serverless_gpu.ray_launch


@pytest.mark.usefixtures("fake_gpus")
def test_more_gpus_than_there_are_says_how_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trial.VARIABLE, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    here = serverless_gpu.distributed(gpus=2, gpu_type="H100", remote=False)(one)
    with pytest.raises(ResourceError, match=r"needs 2 GPUs, but this machine has 1.*set DISTRIBUTOR_COMPAT_CPU=2"):
        here.distributed()


def test_a_warning_says_that_a_pool_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DATABRICKS_REMOTE_GPU_POOL_ID", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv(trial.VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING), pytest.raises(ResourceError):
        serverless_gpu.distributed(gpus=1, remote=False)(one).distributed()
    assert "DATABRICKS_REMOTE_GPU_POOL_ID is set, but there are no pools here" in caplog.text
    assert decorated.pools_set({}) == []


def test_ranks_ask_by_serverless_gpus_names(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 2}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    assert [
        runtime.get_global_rank(),
        runtime.get_world_size(),
        runtime.get_local_rank(),
        runtime.get_local_world_size(),
        runtime.get_node_rank(),
    ] == [*values.values()]
    assert runtime.get_replica_rank() == 2
