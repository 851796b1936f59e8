"""What launch paths have in common: what they refuse, their advice, and which of them start again."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from planned import job

import distributor
from distributor import ConfigurationError
from distributor.launch import Accelerate, DeepSpeed, Jax, Mpi, MpiEnv, Ray, TensorFlow, Torchrun
from distributor.launch.registry import PATHS, by_name
from distributor.values.launch_path import key
from distributor.values.outcome import Failure


@pytest.mark.parametrize(
    ("path", "processes", "told"),
    [
        (TensorFlow(-1), 2, "parameter_servers must be an integer of at least 0, not -1"),
        (TensorFlow(True), 2, "parameter_servers must be an integer of at least 0, not True"),
        (TensorFlow(0, "yes"), 2, "evaluator must be True or False, not 'yes'"),  # type: ignore[arg-type]
        (TensorFlow(2), 3, "num_processes=3 is too few for a chief, a worker, 2 parameter servers: it counts all"),
        (TensorFlow(0, True), 1, "num_processes=1 is too few for a worker, an evaluator: .* raise it to 2 or more"),
        (Mpi("lam"), 2, "implementation must be 'mpich' or 'openmpi', not 'lam'"),
        (Ray("x"), 2, "object_store_memory must be a size such as '8g'"),
        (Ray("10m"), 2, r"object_store_memory must be at least 78,643,200 bytes \(Ray's minimum\), not '10m'"),
    ],
)
def test_a_path_refuses_wrong_arguments(path: Any, processes: int, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        path.resolve(processes, False)


@pytest.mark.parametrize(
    ("launch", "failure", "told"),
    [
        (Jax(), {"message": "RuntimeError: jax.distributed.initialize() must be called before any"}, "initialize() fi"),
        (Jax(), {"message": "ValueError: x"}, ""),
        (MpiEnv(), {"message": "exited with code 1", "log_tail": "error in MPI_Init"}, "starts no MPI"),
        (MpiEnv(), {"message": "ValueError: x"}, ""),
        (Mpi(), {"message": "libmpi.so.12: cannot open shared object", "traceback": "mpi4py"}, "mpich mpi4py"),
        (Mpi(), {"message": "cannot open shared object", "traceback": "x"}, ""),
        (TensorFlow(), {"message": "x", "traceback": '"/lib/keras/src/trainer.py"'}, "TF_USE_LEGACY_KERAS"),
        (TensorFlow(), {"message": "x", "traceback": '"/lib/tf_keras/src/trainer.py"'}, ""),
        (Ray(), {"message": "x"}, ""),
    ],
)
def test_advice_on_failures_of_each_path(launch: Any, failure: dict[str, str], told: str) -> None:
    advice = launch.advise(Failure(0, 0, "host", "ValueError", **failure), job(2, launch))
    assert told in advice and bool(told) == bool(advice)


def test_paths_without_programs_of_their_own_start_again_on_the_same_nodes() -> None:
    """The others get a new job: their programs on other nodes know the first processes only."""
    again = {Torchrun, DeepSpeed, Accelerate}
    assert {path for path in (*again, Ray, Mpi, MpiEnv, TensorFlow, Jax) if path.restarts} == again


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
    assert typed == {*PATHS.values()}
    assert {*distributor.launch.__all__} == {where.partition(":")[2] for where in PATHS.values()}


def test_a_path_has_the_name_under_which_it_is_found() -> None:
    assert [by_name(name).name for name in PATHS] == [*PATHS]  # type: ignore[attr-defined]


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
