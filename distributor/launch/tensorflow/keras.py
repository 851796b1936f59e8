"""Refuse to train with Keras 3 and a strategy of several processes, before Keras fails with an error that hides why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from distributor.errors import ConfigurationError
from distributor.machine.imports import on_import

#: TensorFlow's classes of strategies of several processes.
_STRATEGIES = ("CollectiveAllReduceStrategy", "ParameterServerStrategyV2")


def refuse_keras_3(advice: str, local_rank: int) -> None:
    """Make ``fit``, ``evaluate`` and ``predict`` of Keras 3 raise an error if such a strategy is used."""
    on_import("keras.src.backend.tensorflow.trainer", partial(_refuse, advice=advice))


def _refuse(module: ModuleType, advice: str) -> None:
    trainer: Any = getattr(module, "TensorFlowTrainer", None)
    for name in ("fit", "evaluate", "predict"):
        if callable(method := getattr(trainer, name, None)):
            setattr(trainer, name, _checked(method, advice))


def _checked(method: Callable[..., Any], advice: str) -> Callable[..., Any]:
    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = {kind.__name__.lstrip("_") for kind in type(self.distribute_strategy).__mro__}
        if not kinds.isdisjoint(_STRATEGIES):
            raise ConfigurationError(advice)
        return method(self, *args, **kwargs)

    return checked
