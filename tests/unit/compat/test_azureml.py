"""Azure's distributions and commands: what they ask for, and what is refused."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from distributor import ConfigurationError
from distributor.compat import azureml
from distributor.compat.azureml import (
    MpiDistribution,
    PyTorchDistribution,
    RayDistribution,
    TensorFlowDistribution,
    as_distribution,
    command,
)
from distributor.compat.commands import Program
from distributor.compat.refused import REFUSED
from distributor.launch import MpiEnv, Ray, TensorFlow, Torchrun


@pytest.mark.parametrize(
    ("distribution", "processes", "per_instance", "launch"),
    [
        (PyTorchDistribution(), 2, 1, Torchrun()),
        (PyTorchDistribution(process_count_per_instance=4), 8, 4, Torchrun()),
        (MpiDistribution(process_count_per_instance=4), 8, 4, MpiEnv()),
        (TensorFlowDistribution(), 2, None, TensorFlow()),
        (TensorFlowDistribution(parameter_server_count=1, worker_count=3), 4, None, TensorFlow(parameter_servers=1)),
        (RayDistribution(), 2, 1, Ray()),
    ],
)
def test_a_distribution_chooses_path_and_processes(
    distribution: Any, processes: int, per_instance: int | None, launch: Any
) -> None:
    assert distribution.processes(2) == processes
    assert distribution.per_instance == per_instance
    assert distribution.launch(2) == launch


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: PyTorchDistribution(process_count_per_instance=0), "process_count_per_instance must be a positive"),
        (lambda: MpiDistribution(process_count_per_instance="8"), "process_count_per_instance must be a positive"),
        (lambda: TensorFlowDistribution(parameter_server_count=-1), "parameter_server_count must be a positive"),
        (lambda: TensorFlowDistribution(worker_count=0), "worker_count must be a positive integer, not 0"),
        (
            lambda: TensorFlowDistribution(parameter_server_count=1, worker_count=1).launch(2),
            "parameter_server_count=1 needs a worker besides .* but worker_count=1 leaves none: pass worker_count=2",
        ),
        (lambda: RayDistribution(address="10.0.0.1:6379"), "names a Ray cluster, but the run starts its own"),
        (lambda: RayDistribution(head_node_additional_args="--num-cpus 4"), "head_node_additional_args='--num-cpus 4'"),
        (lambda: RayDistribution(worker_node_additional_args="-v"), "worker_node_additional_args='-v' cannot be used"),
        (lambda: as_distribution({"type": "spark"}), r"or a dict such as .*, not \{'type': 'spark'\}"),
        (
            lambda: as_distribution(object()),
            "distribution must be PyTorchDistribution, .* of distributor.compat.azureml",
        ),
        (lambda: as_distribution({"type": "ray", "nodes": 2}), "distribution=.* cannot be used: .*'nodes'"),
        (lambda: azureml.run(print, instance_count=0), "instance_count must be a positive integer, not 0"),
        (lambda: azureml.run(print, use_gpu="no"), "use_gpu must be True, False or None, not 'no'"),
        (lambda: azureml.run(print, environment_variables={"RANK": "1"}), "environment_variables sets RANK"),
        (
            lambda: azureml.run(print, options={"num_processes": 2}),
            "since PyTorchDistribution on instance_count=1 itself .*: leave it out, and pass instance_count= instead",
        ),
        (
            lambda: azureml.run(print, use_gpu=False, options={"use_gpu": True}),
            "use_gpu=False and options={'use_gpu': True} both set use_gpu",
        ),
    ],
)
def test_wrong_distributions(make: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        make()


@pytest.mark.parametrize(
    ("given", "distribution"),
    [
        ({"type": "PyTorch", "process_count_per_instance": 4}, PyTorchDistribution(process_count_per_instance=4)),
        ({"type": "mpi"}, MpiDistribution()),
        ({"type": "tensorflow", "worker_count": 2}, TensorFlowDistribution(worker_count=2)),
        ({"type": "ray", "port": None}, RayDistribution()),
        (None, PyTorchDistribution()),
    ],
)
def test_a_distribution_may_be_a_dict(given: Any, distribution: Any) -> None:
    made = command(command="python a.py", distribution=given).distribution
    assert (made, type(made)) == (distribution, type(distribution))


def test_arguments_that_a_distribution_does_not_use_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = PyTorchDistribution(node_count=8, process_count_per_instance=4)
        as_distribution({"type": "tensorflow", "worker_count": 2, "added_property": 7})
    assert made.processes(1) == 4
    assert "PyTorchDistribution: node_count is not used here" in caplog.text
    assert "TensorFlowDistribution: added_property is not used here" in caplog.text


def test_a_distribution_can_be_changed() -> None:
    distribution = MpiDistribution()
    distribution.process_count_per_instance = 2
    assert distribution.processes(3) == 6
    with pytest.raises(ConfigurationError, match="process_count_per_instance must be a positive integer, not 0"):
        distribution.process_count_per_instance = 0


def test_arguments_that_ray_does_not_use_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        RayDistribution(port=6379, include_dashboard=True, dashboard_port=8265)
    assert caplog.text.count("is not used: the run reserves free ports, and starts no dashboard") == 3
    assert all(told in caplog.text for told in (" port=6379", "include_dashboard=True", "dashboard_port=8265"))


def test_an_input_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="input 'data' must be text, a number or an object with a path"):
        command(command="python a.py", inputs={"data": [1]})


def test_a_command_is_a_value(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        job = command(
            command="python a.py", compute="gpu-cluster", environment="azureml:torch@latest", instance_count=2
        )
    assert (job.program, job.instance_count, job.distribution) == (Program("a.py"), 2, PyTorchDistribution())
    assert "command: compute, environment are not used here" in caplog.text
    with pytest.raises(ConfigurationError, match=r"command\(\) cannot use outputs: leave it out"):
        command(command="python a.py", outputs={})


def test_a_command_can_be_changed(caplog: pytest.LogCaptureFixture) -> None:
    job = command(command="python a.py", instance_count=1)
    job.distribution = TensorFlowDistribution(worker_count=2)
    job.resources = azureml.ResourceConfiguration(instance_type="STANDARD_NC4AS_T4_V3", instance_count=3)
    with caplog.at_level(logging.WARNING):
        job.compute = "gpu-cluster"
    assert (job.distribution.processes(1), job.instances) == (2, 3)
    assert "command: compute is not used here" in caplog.text
    job.distribution = {"type": "mpi"}
    assert job.distribution == MpiDistribution()
    with pytest.raises(ConfigurationError, match="a command has no attribute 'outputs' here: leave it out, or set one"):
        job.outputs = {}
    with pytest.raises(ConfigurationError, match="instance_count must be a positive integer, not 0"):
        job.instance_count = 0


@pytest.mark.parametrize(
    ("resources", "instances"),
    [({"instance_count": 2}, 2), (azureml.JobResourceConfiguration(instance_count=2), 2), ({}, 1), (None, 1)],
)
def test_resources_say_how_many_instances(resources: Any, instances: int) -> None:
    assert command(command="python a.py", resources=resources).instances == instances


@pytest.mark.parametrize(
    ("resources", "told"),
    [
        (2, r"resources must be a dict such as \{\"instance_count\": 2\}, not 2"),
        ({"instance_count": 0}, "instance_count must be a positive integer, not 0"),
    ],
)
def test_wrong_resources(resources: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        command(command="python a.py", resources=resources)


def test_an_input_is_its_path() -> None:
    data = azureml.Input(type=azureml.AssetTypes.URI_FOLDER, path="/mnt/data", mode="ro_mount")
    assert command(command="python a.py ${{inputs.data}}", inputs={"data": data}).program.arguments == ("/mnt/data",)


@pytest.mark.parametrize("name", REFUSED["azure.ai.ml"][1])
def test_names_of_azure_that_are_not_supported_say_what_to_use(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"azure.ai.ml.{name} is not supported: use "):
        getattr(azureml, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        azureml.no_such_name


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"distribution": PyTorchDistribution()}, "distribution cannot be passed to run() with a command"),
        ({"instance_count": 2}, "instance_count=2 cannot be passed to run() with a command"),
        ({"lr": 0.1}, "lr cannot be passed to run() with a command"),
    ],
)
def test_a_command_takes_no_further_arguments(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        azureml.run(command(command="python a.py"), **given)
