"""How ranks are started, as users ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import trainings

import distributor
from distributor import ConfigurationError, DeepspeedTorchDistributor, Distributor, TorchDistributor
from distributor.launch import NAMES, Accelerate, DeepSpeed, Jax, Mpi, MpiEnv, Ray, TensorFlow, Torchrun
from distributor.launch.deepspeed.path import DeepspeedRanks
from distributor.values.launch_path import BasePath
from distributor.values.plan import Plan, Site

CONFIG = {"train_micro_batch_size_per_gpu": 4}


def planned(launch: Any) -> Any:
    return Distributor(2, local_mode=True, use_gpu=False, launch=launch).plan(trainings.rank)


@pytest.mark.parametrize(
    ("launch", "path"),
    [("torchrun", Torchrun()), (Torchrun(), Torchrun()), ("deepspeed", DeepspeedRanks())],
)
def test_a_launch_path_is_a_value_of_the_job(launch: Any, path: Any) -> None:
    assert planned(launch).launch == path


def test_the_default_is_torchrun() -> None:
    assert TorchDistributor(2, True, False).plan(trainings.rank).launch == Torchrun()


def test_pysparks_name_for_deepspeed_is_the_same_path() -> None:
    pytest.importorskip("deepspeed")
    theirs = DeepspeedTorchDistributor(2, 1, True, False, CONFIG).plan(trainings.rank)
    ours = planned(DeepSpeed(CONFIG))
    assert ours.launch.config is not None
    assert (ours.launch, ours.env, ours.preload) == (theirs.launch, theirs.env, theirs.preload)


@pytest.mark.parametrize("launch", ["slurm", "", None, 3, DeepSpeed, Torchrun])
def test_what_is_no_launch_path(launch: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"launch must be 'torchrun' or .* or 'tensorflow' or a launch path such as distributor.launch.D",
    ) as caught:
        planned(launch)
    assert str(caught.value).endswith(f"not {launch!r}")


def test_another_path_under_pysparks_name_for_deepspeed() -> None:
    with pytest.raises(
        ConfigurationError, match=r"launch='torchrun' does not fit DeepspeedTorchDistributor, .*: use Distributor$"
    ):
        DeepspeedTorchDistributor(2, useGpu=False, launch="torchrun")


@dataclass(frozen=True)
class Greeting(BasePath):
    """A path of somebody else's."""

    name: str = "greeting"
    preload: ClassVar[tuple[str, ...]] = ("json",)

    @property
    def needs(self) -> Mapping[str, str]:
        return {}

    def resolve(self, num_processes: int, use_gpu: bool) -> Greeting:
        return self

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        return {"BEFORE": "torch"}

    def plan(self, site: Site) -> Plan:
        return Torchrun().plan(site)


def test_what_a_path_asks_for_before_torch_is_imported_is_in_the_job() -> None:
    job = planned(Greeting())
    assert (job.launch, job.preload, job.env["BEFORE"]) == (Greeting(), ("json",), "torch")


def test_the_package_of_launch_paths_is_loaded_on_first_use() -> None:
    assert {getattr(distributor.launch, name) for name in NAMES.values()} == {
        *(Torchrun, Accelerate, DeepSpeed, Jax, Mpi, MpiEnv, Ray, TensorFlow)
    }
    with pytest.raises(AttributeError, match="no_such_path"):
        distributor.launch.no_such_path
