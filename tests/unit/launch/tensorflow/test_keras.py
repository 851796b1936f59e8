"""With which strategies Keras 3 is refused, without TensorFlow."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from distributor.errors import ConfigurationError
from distributor.launch.tensorflow import keras


def trainer(strategy: str) -> Any:
    """A model of Keras 3 that was made in the scope of a strategy, in a process that refuses some."""

    class TensorFlowTrainer:
        distribute_strategy = type(strategy, (), {})()

        def fit(self, x: int, *, epochs: int) -> int:
            return x * epochs

    module: Any = ModuleType("keras.src.backend.tensorflow.trainer")
    module.TensorFlowTrainer = TensorFlowTrainer
    keras._refuse(module, "use tf_keras")
    return module.TensorFlowTrainer()


@pytest.mark.parametrize("strategy", ["CollectiveAllReduceStrategy", "ParameterServerStrategyV2"])
def test_keras_3_is_refused_with_strategies_of_several_processes(strategy: str) -> None:
    with pytest.raises(ConfigurationError, match="^use tf_keras$"):
        trainer(strategy).fit(2, epochs=3)


@pytest.mark.parametrize("strategy", ["MirroredStrategy", "_DefaultDistributionStrategy"])
def test_keras_3_trains_with_strategies_of_one_process(strategy: str) -> None:
    assert trainer(strategy).fit(2, epochs=3) == 6


def test_a_version_without_the_class_is_left_alone() -> None:
    keras._refuse(ModuleType("keras.src.backend.tensorflow.trainer"), "use tf_keras")
