"""What nodes have to know of DeepSpeed's configuration, as the driver finds it out."""

from __future__ import annotations

import json

import pytest

from distributor import zero
from distributor.launch import DeepSpeed
from distributor.launch.deepspeed.resolved import ResolvedConfig


def resolved(stage: int, precision: str) -> ResolvedConfig:
    found = DeepSpeed(zero(stage, precision=precision, torch_adam=True)).resolve(2, False).resolved
    assert found is not None
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stage_and_precision_are_those_of_the_configuration(stage: int, precision: str) -> None:
    found = resolved(stage, precision)
    assert (found.stage, found.precision) == (stage, precision)
    assert json.loads(found.final)["zero_optimization"]["stage"] == stage


def test_only_the_final_configuration_has_no_auto() -> None:
    found = resolved(3, "fp32")
    assert "auto" not in found.final
    assert "auto" in found.given
