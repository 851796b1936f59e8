"""PySpark's interface to DeepSpeed: its arguments, and copies with another configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trainings

from distributor import ConfigurationError, DeepspeedTorchDistributor, Distributor, TorchDistributor
from distributor.launch import DeepSpeed
from distributor.launch.deepspeed.config import AUTO, MICRO, TRAIN


def test_auto_without_a_configuration_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"auto=\{'learning_rate': 1\} fills in a deepspeedConfig, but there is none"
    ):
        DeepspeedTorchDistributor(2, localMode=True, useGpu=False, auto={"learning_rate": 1})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"numGpus": 0}, "numGpus must be a positive integer, not 0"),
        ({"nnodes": "2"}, "nnodes must be a positive integer, not '2'"),
        ({"num_processes": 2}, "num_processes is not an option here: pass numGpus (ranks on each node) and nnodes"),
        ({"use_gpu": False}, "use_gpu is called useGpu here"),
        ({"extensions_timeout": 0}, "extensions_timeout must be a number of seconds from 1 to a year, not 0"),
        ({"deepspeedConfig": 3}, "deepspeedConfig must be a dict or the path of a JSON or YAML file, not int 3"),
        ({"preload": "torch"}, "preload must be a list of module names, not 'torch'"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DeepspeedTorchDistributor(**{"localMode": True, "useGpu": False, **arguments})
    assert text in str(caught.value)


def test_its_repr_is_the_call_that_makes_it() -> None:
    made = "DeepspeedTorchDistributor(numGpus=2, nnodes=3, localMode=True, useGpu=False)"
    assert repr(DeepspeedTorchDistributor(2, 3, True, False)) == made


def test_pysparks_ways_to_call_it() -> None:
    assert DeepspeedTorchDistributor(4, 2, True, False).num_processes == 8
    assert DeepspeedTorchDistributor(numGpus=True, useGpu=False, localMode=True).num_processes == 1
    assert isinstance(DeepspeedTorchDistributor(useGpu=False), TorchDistributor)
    assert DeepspeedTorchDistributor(useGpu=False, deepspeedConfig={TRAIN: 8}).deepspeed_config == {TRAIN: 8}


def test_another_configuration_leaves_the_first_alone() -> None:
    one = DeepspeedTorchDistributor(2, 1, True, False, {MICRO: 1}, auto={"learning_rate": 1.0}, grace_period=3)
    other = one.with_config({MICRO: 2, TRAIN: AUTO})
    assert (one.deepspeed_config, other.deepspeed_config) == ({MICRO: 1}, {MICRO: 2, TRAIN: AUTO})
    path = other.plan(trainings.rank).launch
    assert isinstance(path, DeepSpeed) and path.deepspeed_config is not None
    assert json.loads(path.deepspeed_config)[TRAIN] == 4
    assert other._options.deadlines.grace_period == 3
    with pytest.raises(ConfigurationError, match="train_batch_size 3 is not a multiple of 2 ranks"):
        one.with_config({TRAIN: 3})


CONFIG = {"train_micro_batch_size_per_gpu": 4}


def planned(launch: Any) -> Any:
    return Distributor(2, local_mode=True, use_gpu=False, launch=launch).plan(trainings.rank)


def test_pysparks_name_for_deepspeed_is_the_same_path() -> None:
    pytest.importorskip("deepspeed")
    theirs = DeepspeedTorchDistributor(2, 1, True, False, CONFIG).plan(trainings.rank)
    ours = planned(DeepSpeed(CONFIG))
    assert ours.launch.deepspeed_config is not None
    assert (ours.launch, ours.env, ours.preload) == (theirs.launch, theirs.env, theirs.preload)


def test_another_path_under_pysparks_name_for_deepspeed() -> None:
    with pytest.raises(
        ConfigurationError, match=r"launch='torchrun' does not fit DeepspeedTorchDistributor, .*: use Distributor$"
    ):
        DeepspeedTorchDistributor(2, useGpu=False, launch="torchrun")
