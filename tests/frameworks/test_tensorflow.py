"""TensorFlow: workers that mirror each other, and parameter servers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import launched
import paths
import pytest
import victims
import watch
from leftovers import Leftovers
from sessions import LOCAL, Make

from distributor import TrainingError
from distributor.launch import TensorFlow

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.slow

#: The system in the table of docs/frameworks.md.
SYSTEM = ("TensorFlow", "tensorflow-cpu")


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "MultiWorkerMirroredStrategy")
def test_workers_mirror_each_other(make: Make) -> None:
    values = make(2, launch="tensorflow").submit(launched.mirror).results(watch.DEADLINE)
    assert values == [[3.0, 2], [3.0, 2]]


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "ParameterServerStrategy with an evaluator")
def test_parameter_servers_end_with_the_chief(make: Make, tmp_path: Path) -> None:
    launch = TensorFlow(parameter_servers=1, evaluator=True)
    run = make(4, launch=launch).submit(launched.train_with_parameter_servers, str(tmp_path), 10)
    assert run.results(2 * watch.DEADLINE) == [10, None, None, 10]
    assert {path.name for path in tmp_path.iterdir()} == {"chief 0", "worker 0", "ps 0", "evaluator 0", "trained"}


@pytest.mark.framework(*SYSTEM, "a parameter server that fails")
def test_a_server_that_ends_too_early_is_the_root(make: Make, tmp_path: Path) -> None:
    run = make(3, launch=TensorFlow(parameter_servers=1), grace_period=2).submit(
        launched.train_with_parameter_servers, str(tmp_path), fail="ps 0"
    )
    with pytest.raises(TrainingError, match=r"rank 2 on \S+ failed: ValueError: bad batch"):
        run.result(2 * watch.DEADLINE)


SERVERS = "parameter-servers"


@pytest.mark.framework(*SYSTEM, "the death of a process")
@pytest.mark.parametrize(
    ("mode", "victim"),
    victims.cases(
        [*paths.TASKS, "launcher", "agent", "executor"], ["ps 0", "chief 0", "agent"], ["worker 0", "executor"]
    ),
    indirect=["mode"],
)
def test_nothing_is_left(victim: str, local: bool, tmp_path: Path, leftovers: Leftovers) -> None:
    run = paths.distributor(SERVERS, 4, local, grace_period=2).submit(paths.training(SERVERS), str(tmp_path))
    victims.await_ranks(SERVERS, 4, tmp_path)
    victims.strike(run, {**victims.KILLS, **victims.ranks(SERVERS, 4, tmp_path)}[victim])
    leftovers.gone(run.id)


@pytest.mark.framework(*SYSTEM, "the death of the driver")
@pytest.mark.parametrize("path", [SERVERS, "tensorflow"])
def test_a_killed_driver_leaves_nothing(path: str, tmp_path: Path, leftovers: Leftovers) -> None:
    victims.kill_a_driver(path, LOCAL, 4, tmp_path, leftovers)


def fit_with_keras() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(tf.ones((8, 2)), tf.ones((8, 1)), batch_size=4, verbose=0)


@pytest.mark.framework(*SYSTEM, "the error of Keras 3's model.fit")
def test_keras_3_gets_advice(make_local: Make) -> None:
    with pytest.raises(TrainingError, match="Keras 3 does not train with strategies of several processes"):
        make_local(2, launch="tensorflow", grace_period=2).submit(fit_with_keras).result(watch.DEADLINE)


def config() -> Any:
    return json.loads(os.environ["TF_CONFIG"])["task"], "tensorflow" in sys.modules, watch.started_by() != 0


@pytest.mark.framework(*SYSTEM, "imported before the fork")
def test_all_processes_count_and_have_tensorflow_at_once(make_local: Make) -> None:
    values = make_local(2, launch=TensorFlow()).submit(config).results(watch.DEADLINE)
    assert values == [({"type": "worker", "index": index}, True, True) for index in (0, 1)]


def test_a_warm_process_that_has_used_tensorflow_is_not_forked(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "uses_tensorflow.py").write_text("import tensorflow\ntensorflow.constant(1.0)\n")
    options: dict[str, Any] = {"preload": ["uses_tensorflow"], "env": {"PYTHONPATH": str(tmp_path)}}
    assert make_local(1, launch="tensorflow", **options).submit(config).result(watch.DEADLINE)[2] is False
    assert "uses TensorFlow, whose threads do not survive a fork: leave that module out of preload" in caplog.text
