"""The decisions of autotuning; real experiments are elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from distributor import (
    ConfigurationError,
    DeepspeedTorchDistributor,
    PayloadError,
    ResourceError,
    TorchDistributor,
    TrainingError,
    autotune,
)
from distributor.api import autotune as autotuning
from distributor.api.autotune import Experiment, Tuning, best, combinations, is_out_of_memory, merged
from distributor.values.outcome import Failure


def ended(number: int, metric: float | None) -> Experiment:
    return Experiment({"a": number}, "failed" if metric is None else "finished", metric, 1.0, config={"a": number})


def test_the_best_is_the_first_of_the_best() -> None:
    experiments = [ended(0, None), ended(1, 2.0), ended(2, 3.0), ended(3, 3.0), ended(4, 0.0)]
    assert best(experiments, less=False) is experiments[2]
    assert best(experiments, less=True) is experiments[4]
    assert best(experiments[:1], less=False) is None
    for less in (True, False):  # a loss that is not a number any more
        assert best([ended(0, float("nan")), ended(1, 1.0), ended(2, float("inf"))], less) == ended(1, 1.0)


def test_the_table_of_experiments() -> None:
    one, two = ended(1, 1234.5), Experiment({"b": "x"}, "out of memory", None, 2.25, "rank 0 failed: no memory")
    assert str(Tuning("throughput", (one, two), one)).splitlines() == [
        "   a  b  throughput  seconds                                  outcome",
        "1  1          1,234      1.0                         finished <- best",
        "2     x                  2.2  out of memory: rank 0 failed: no memory",
    ]


def test_no_best_configuration() -> None:
    with pytest.raises(TrainingError, match=r"no experiment finished with a finite metric:\n.*\n1 .*failed"):
        _ = Tuning("throughput", (ended(0, None),), None).best_config
    assert Tuning("throughput", (ended(0, 1.0),), ended(0, 1.0)).best_config == {"a": 0}


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ({}, "space is empty: {}"),
        ([], r"space is empty: \[\]"),
        ({"a": 3}, "space: 'a' needs a list of values, not 3"),
        ({"a": []}, r"space: 'a' needs a list of values, not \[\]"),
        ({"a": "cpu"}, "space: 'a' needs a list of values, not 'cpu'"),
        (3, "space must map paths to lists of values, or be a list of mappings, not 3"),
        ([3], "space must be a list of mappings, but one item is 3"),
    ],
)
def test_wrong_search_spaces_are_refused(space: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        combinations(space)


def test_every_combination_or_just_these() -> None:
    assert len(combinations({"a": [1, 2, 3], "b": (4, 5)})) == 6
    assert combinations([{"a": 1}, {"b": 2}]) == [{"a": 1}, {"b": 2}]


def test_a_path_through_a_value_is_refused() -> None:
    assert merged({"bf16": {"enabled": True}}, {"bf16": {"enabled": False}}) == {"bf16": {"enabled": False}}
    with pytest.raises(
        ConfigurationError, match="space: to set 'a.b', 'a' must be a mapping in the configuration, but it is 1"
    ):
        merged({"a": 1}, {"a.b": 2})


def test_autotuning_refuses_an_unknown_mode() -> None:
    with pytest.raises(ConfigurationError, match="mode must be 'max' or 'min', not 'best'"):
        autotune(print, {"a": [1]}, mode="best")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("OutOfMemoryError", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError", "RuntimeError: [enforce fail at alloc_cpu.cpp:121] ... can't allocate memory: you", True),
        ("MemoryError", "MemoryError", True),
        ("signal", "killed by SIGKILL, most likely for lack of memory", True),
        ("RuntimeError", "RuntimeError: shapes cannot be multiplied", False),
    ],
)
def test_errors_that_mean_out_of_memory(kind: str, message: str, expected: bool) -> None:
    other = Failure(0, 0, "host", "RuntimeError", "RuntimeError: connection closed by peer")
    failure = Failure(1, 0, "host", kind, message)
    assert is_out_of_memory(TrainingError("rank 0 on host failed", [other, failure])) is expected


class Refusing:
    """A distributor whose runs cannot be submitted."""

    deepspeed_config = None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def with_config(self, config: Any) -> Refusing:
        return self

    def submit(self, *_: Any) -> Any:
        raise self.error


def test_errors_that_no_configuration_causes_end_the_tuning() -> None:
    for error in (ResourceError("no GPUs"), PayloadError("not a function")):
        with pytest.raises(type(error)):
            autotune(print, {"a": [1]}, distributor=Refusing(error))  # type: ignore[arg-type]
    tuning = autotune(print, {"a": [1]}, distributor=Refusing(ConfigurationError("no")))  # type: ignore[arg-type]
    assert [each.state for each in tuning.experiments] == ["refused"]


def test_a_stage_of_the_wrong_type_does_not_end_the_tuning() -> None:
    distributor = DeepspeedTorchDistributor(1, localMode=True, useGpu=False)
    tuning = autotune(print, [{"zero_optimization.stage": stage} for stage in ([1, 2], {})], distributor=distributor)
    assert [each.state for each in tuning.experiments] == ["refused", "refused"]
    assert "zero_optimization.stage is [1, 2], but must be one of" in tuning.experiments[0].reason


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"loss": 1.0}, "the function must return 'throughput'; rank 0 returned a mapping with 'loss'"),
        (None, "the function must return 'throughput' from rank 0, as a number or in a mapping; it returned None"),
        ({"throughput": "fast"}, "it returned 'fast'"),
    ],
)
def test_a_function_that_returns_no_metric_is_an_error(value: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        autotuning._measured(value, "throughput")
    assert text in str(caught.value)


def test_a_measurement() -> None:
    import numpy

    assert autotuning._measured(numpy.float32(2.5), "throughput") == 2.5
    assert autotuning._measured({"throughput": 3}, "throughput") == 3.0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"timeout": float("nan")}, "^timeout must be a number of seconds"),
        ({"timeout": "60"}, "^timeout must be a number of seconds"),
        ({"distributor": TorchDistributor(1, True, False)}, "^distributor must be a DeepspeedTorchDistributor, not"),
    ],
)
def test_wrong_arguments_start_no_experiment(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        autotune(print, {"a": [1]}, **options)
