"""How ranks are started, as users ask for it."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trainings

import distributor
from distributor import ConfigurationError, DeepspeedTorchDistributor, Distributor, TorchDistributor
from distributor.launch import PATHS, Accelerate, DeepSpeed, Jax, Mpi, MpiEnv, Ray, TensorFlow, Torchrun, by_name
from distributor.values.launch_path import BasePath, key
from distributor.values.plan import Plan, Site

CONFIG = {"train_micro_batch_size_per_gpu": 4}


def planned(launch: Any) -> Any:
    return Distributor(2, local_mode=True, use_gpu=False, launch=launch).plan(trainings.rank)


@pytest.mark.parametrize(
    ("launch", "path"), [("torchrun", Torchrun()), (Torchrun(), Torchrun()), ("deepspeed", DeepSpeed())]
)
def test_a_launch_path_is_a_value_of_the_job(launch: Any, path: Any) -> None:
    assert planned(launch).launch == path


def test_the_default_is_torchrun() -> None:
    assert TorchDistributor(2, True, False).plan(trainings.rank).launch == Torchrun()


def test_pysparks_name_for_deepspeed_is_the_same_path() -> None:
    pytest.importorskip("deepspeed")
    theirs = DeepspeedTorchDistributor(2, 1, True, False, CONFIG).plan(trainings.rank)
    ours = planned(DeepSpeed(CONFIG))
    assert ours.launch.deepspeed_config is not None
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
    assert {getattr(distributor.launch, where.partition(":")[2]) for where in PATHS.values()} == {
        *(Torchrun, Accelerate, DeepSpeed, Jax, Mpi, MpiEnv, Ray, TensorFlow)
    }
    with pytest.raises(AttributeError, match="no_such_path"):
        distributor.launch.no_such_path


def test_types_and_the_table_name_the_same_classes() -> None:
    tree = ast.parse(Path(distributor.launch.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {f"{node.module}:{node.names[0].name}" for node in block.body if isinstance(node, ast.ImportFrom)}
    assert typed == {*PATHS.values(), "distributor.values.launch_path:Launch"}
    assert {*distributor.launch.__all__} == {where.partition(":")[2] for where in PATHS.values()} | {"by_name"}


def test_a_path_has_the_name_under_which_it_is_found() -> None:
    assert [by_name(name).name for name in PATHS] == [*PATHS]  # type: ignore[attr-defined]


class Number(float):
    """A user's number, of a class that nodes need not have."""


class Folder(str):
    """A user's path, of a class that nodes need not have."""


@pytest.mark.parametrize("as_path", [False, True])
def test_what_deepspeed_resolves_to_is_plain_data(tmp_path: Path, as_path: bool) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 4}')
    config: Any = Folder(file) if as_path else {**CONFIG, "gradient_clipping": Number(1.0)}
    path = DeepSpeed(config, {"learning_rate": Number(0.5), "total_steps": Number}).resolve(2, False)
    assert path == pickle.loads(pickle.dumps(path))
    assert not re.search(rb"Number|Folder|pathlib", pickle.dumps(path))
    assert path.auto == {"learning_rate": 0.5}
    assert path.config == (str(file) if as_path else {**CONFIG, "gradient_clipping": 1.0})
    assert path.resolve(2, False) == path


@pytest.mark.parametrize("launch", [Mpi("mpich"), Ray("2g")])
def test_a_secret_is_made_for_each_run_and_not_shown(launch: Any) -> None:
    one, other = launch.resolve(2, False), launch.resolve(2, False)
    assert type(one) is type(launch)
    assert len({one.secret, other.secret, ""}) == 3
    assert one.secret not in repr(one) and "secret" not in repr(one)
    assert launch.secret == "" and one.resolve(2, False).secret != one.secret


def test_a_path_that_is_not_resolved_makes_no_key() -> None:
    with pytest.raises(AssertionError, match="no secret until it is resolved"):
        key(Mpi().secret, "run")
