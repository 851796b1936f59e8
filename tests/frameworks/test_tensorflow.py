"""TensorFlow: workers that mirror each other, and parameter servers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import launched
import pytest
import watch
from sessions import Make

from distributor import TrainingError
from distributor.launch import TensorFlow

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.slow

#: The system in the table of docs/frameworks.md.
SYSTEM = ("TensorFlow", "tensorflow-cpu")


@pytest.mark.framework(*SYSTEM, "MultiWorkerMirroredStrategy")
def test_workers_mirror_each_other(make: Make) -> None:
    values = make(2, launch="tensorflow").submit(launched.mirror).results(watch.DEADLINE)
    assert values == [[3.0, 2], [3.0, 2]]


@pytest.mark.framework(*SYSTEM, "ParameterServerStrategy with an evaluator")
def test_parameter_servers_end_with_the_chief(make: Make, tmp_path: Path) -> None:
    launch = TensorFlow(parameter_servers=1, evaluator=True)
    run = make(4, launch=launch).submit(launched.serve_or_train, str(tmp_path))
    assert run.result(2 * watch.DEADLINE) == 10.0
    assert run.results() == [10.0, None, None, "evaluated"]
    assert {path.name for path in tmp_path.iterdir()} == {"chief 0", "worker 0", "ps 0", "evaluator 0", "trained"}


@pytest.mark.framework(*SYSTEM, "a server that fails or is killed is the root")
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"fail": "ps 0"}, r"rank 2 on \S+ failed: ValueError: bad batch"),
        ({"kill": "worker 0"}, r"rank 1 on \S+ failed: killed by"),
    ],
)
def test_a_server_that_ends_too_early_is_the_root(how: Any, told: str, make: Make, tmp_path: Path) -> None:
    run = make(3, launch=TensorFlow(parameter_servers=1), grace_period=2).submit(
        launched.serve_or_train, str(tmp_path), **how
    )
    with pytest.raises(TrainingError, match=told):
        run.result(2 * watch.DEADLINE)


def fit_with_keras() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(tf.ones((8, 2)), tf.ones((8, 1)), batch_size=4, verbose=0)


@pytest.mark.framework(*SYSTEM, "Keras 3 gets advice")
def test_keras_3_gets_advice(make_local: Make) -> None:
    with pytest.raises(TrainingError, match="Keras 3 does not train with strategies of several processes"):
        make_local(2, launch="tensorflow", grace_period=2).submit(fit_with_keras).result(watch.DEADLINE)


def config() -> Any:
    return json.loads(os.environ["TF_CONFIG"])["task"]


def test_all_processes_count(make_local: Make) -> None:
    values = make_local(2, launch=TensorFlow()).submit(config).results(watch.DEADLINE)
    assert values == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
