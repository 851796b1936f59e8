"""Configurations for ZeRO stages, and the estimates by which one is suggested."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from distributor import ConfigurationError, DeepspeedTorchDistributor, suggest_zero, zero
from distributor.launch.deepspeed import config as deepspeed_config, reading
from distributor.launch.deepspeed.config import MICRO, TRAIN
from distributor.launch.deepspeed.zero import estimate

CHOICES = [
    (stage, offload, precision)
    for stage, offload, precision in itertools.product(range(4), ("none", "cpu", "nvme"), ("bf16", "fp16", "fp32"))
    if stage >= {"none": 0, "cpu": 1, "nvme": 3}[offload]
]


@pytest.mark.parametrize(("stage", "offload", "precision"), CHOICES)
def test_every_choice_is_complete_and_explained(stage: Any, offload: Any, precision: Any, tmp_path: Path) -> None:
    config = zero(stage, offload, precision, nvme_path="/nvme" if offload == "nvme" else None)
    final = deepspeed_config.fill(config, 4, {"hidden_size": 64, "micro_batch_size": 2})
    deepspeed_config.check(final, 4)
    assert "auto" not in json.dumps(final)
    assert final[TRAIN] == 8
    assert deepspeed_config.precision(final) == precision
    section = final["zero_optimization"]
    assert section["stage"] == stage
    assert section.get("offload_optimizer", {"device": "none"})["device"] == offload
    assert ("offload_param" in section) == (stage == 3 and offload != "none")
    (tmp_path / "ds.json").write_text(str(config))  # as a person would keep it
    assert reading.read(tmp_path / "ds.json") == config
    bare = [line.strip() for line in str(config).splitlines() if "//" not in line and line.strip("{}, ")]
    known = ('"betas"', '"eps"', '"weight_decay"')  # what a person who sets these knows
    assert all(line.endswith("{") or line.startswith(known) for line in bare), bare


@pytest.mark.parametrize(("stage", "offload", "precision"), [c for c in CHOICES if c[1] != "nvme"])
def test_deepspeed_accepts_the_configuration(stage: Any, offload: Any, precision: Any) -> None:
    config_module = pytest.importorskip("deepspeed.runtime.config")
    final = deepspeed_config.fill(zero(stage, offload, precision), 1, {})
    theirs = config_module.DeepSpeedConfig(dict(final))
    assert (theirs.zero_optimization_stage, theirs.train_batch_size) == (stage, 8)
    assert (theirs.float16_config.enabled, theirs.bfloat16_config.enabled) == (precision == "fp16", precision == "bf16")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, not 4"),
        ({"stage": True}, "stage must be 0, 1, 2 or 3, not True"),
        ({"stage": [2]}, "stage must be 0, 1, 2 or 3, not [2]"),
        ({"stage": {"stage": 2}}, "stage must be 0, 1, 2 or 3, not {'stage': 2}"),
        ({"offload": "disk"}, "offload must be 'none' or 'cpu' or 'nvme', not 'disk'"),
        ({"precision": "fp8"}, "precision must be 'bf16' or 'fp16' or 'fp32', not 'fp8'"),
        ({"micro_batch_size": 0}, "micro_batch_size must be a positive integer, not 0"),
        ({"stage": 0, "offload": "cpu"}, "offload='cpu' needs stage 1 or more, not 0"),
        ({"stage": 2, "offload": "nvme"}, "offload='nvme' needs stage 3, not 2"),
        ({"stage": 3, "offload": "nvme"}, "offload='nvme' needs nvme_path"),
    ],
)
def test_wrong_choices_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        zero(**arguments)
    assert text in str(caught.value)


def test_values_are_set_at_their_paths() -> None:
    config = zero(1, micro_batch_size=3, gradient_accumulation_steps=2, learning_rate=0.1, gradient_clipping=0.0)
    final = deepspeed_config.fill(config, 4, {})
    assert (final[TRAIN], final[MICRO], final["gradient_clipping"]) == (24, 3, 0.0)
    assert final["optimizer"]["params"]["lr"] == 0.1
    assert "torch_adam" not in final["optimizer"]["params"]
    assert zero(1, torch_adam=True)["optimizer"]["params"]["torch_adam"] is True
    assert DeepspeedTorchDistributor(4, 1, True, False, config).num_processes == 4


SHAPES = list(itertools.product((124_000_000, 7_000_000_000, 175_000_000_000), (1, 4, 8), (1, 2, 16)))


@pytest.mark.parametrize(("parameters", "gpus", "nodes"), SHAPES)
@pytest.mark.parametrize("offload", [False, True])
def test_estimates_are_those_of_deepspeed(parameters: int, gpus: int, nodes: int, offload: bool) -> None:
    zero2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    zero3 = pytest.importorskip("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    largest = parameters // 50
    host, gpu = zero2(parameters, gpus, nodes, cpu_offload=offload)
    assert estimate(parameters, largest, 2, offload, gpus, nodes) == pytest.approx((gpu, host), rel=0.05)
    host, gpu, _ = zero3(parameters, largest, gpus, nodes, cpu_offload=offload, cpu_offload_params=offload)
    assert estimate(parameters, largest, 3, offload, gpus, nodes) == pytest.approx((gpu, host), rel=0.05)


def test_more_is_split_with_each_stage() -> None:
    """On one GPU there is nobody to split anything with: each stage but the third takes the same."""
    sizes = [estimate(1000, 10, stage, False, 8, 1)[0] for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 20 * 1000
    assert [estimate(1000, 10, stage, False, 1, 1)[0] for stage in range(3)] == [20_000] * 3


def test_a_model_is_counted_once() -> None:
    import torch

    with torch.device("meta"):
        tied = torch.nn.Linear(1000, 100, bias=False)
        model = torch.nn.Sequential(torch.nn.Embedding(100, 1000), torch.nn.Linear(1000, 10))
        model[0].weight = tied.weight
    model.add_module("head", tied)
    found = suggest_zero(model)
    assert found.parameters == 100 * 1000 + 1000 * 10 + 10
    assert found.estimates[3].gpu_bytes == 4 * 100_000 + 18 * found.parameters
    assert found.best is None
    assert str(found).endswith("to see which stages fit, pass gpu_memory='80g'")
    assert str(suggest_zero(7e9, gpu_memory="0.5g")).endswith(
        "more GPUs or nodes, or zero(3, offload='nvme', nvme_path=...)"
    )
    with pytest.raises(ConfigurationError, match="no stage is known to fit: pass gpu_memory='80g' to suggest_zero"):
        found.config()


@pytest.mark.parametrize(
    ("memory", "host", "expected"),
    [
        ("400g", "1t", (0, "none")),
        ("80g", "1t", (1, "none")),
        ("48g", "1t", (2, "none")),
        ("24g", "1t", (3, "none")),
        ("16g", "1t", (3, "cpu")),
        ("16g", "100g", None),
        ("0.5g", "1t", None),
        (80 << 30, None, (1, "none")),
    ],
)
def test_the_least_sharded_stage_that_fits_is_suggested(memory: Any, host: Any, expected: Any) -> None:
    found = suggest_zero(7e9, num_gpus_per_node=8, gpu_memory=memory, host_memory=host)
    assert (found.best and (found.best.stage, found.best.offload)) == expected
    if expected is not None:
        assert found.config(micro_batch_size=1)["zero_optimization"]["stage"] == expected[0]
        assert str(found).count("<- best") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model_or_parameter_count": 0}, "the number of parameters must be a positive integer, not 0"),
        ({"model_or_parameter_count": "7b"}, "the number of parameters must be a positive integer, not '7b'"),
        ({"model_or_parameter_count": 1.5}, "the number of parameters must be a positive integer, not 1.5"),
        ({"model_or_parameter_count": float("inf")}, "the number of parameters must be a positive integer, not inf"),
        ({"model_or_parameter_count": float("nan")}, "the number of parameters must be a positive integer, not nan"),
        ({"nnodes": 0}, "nnodes must be a positive integer, not 0"),
        ({"gpu_memory": 80}, "gpu_memory must be a size such as '8g'"),
        ({"gpu_memory": "much"}, "gpu_memory must be a size such as '8g'"),
        ({"host_memory": -1}, "host_memory must be a size such as '8g'"),
        ({"activation_share": 1}, "activation_share must be at least 0 and less than 1, not 1"),
        ({"largest_layer_parameters": 1.5}, "largest_layer_parameters must be a positive integer, not 1.5"),
    ],
)
def test_suggestions_need_true_numbers(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        suggest_zero(**{"model_or_parameter_count": 1000, **arguments})
    assert text in str(caught.value)


def test_a_model_without_parameters() -> None:
    import torch

    with pytest.raises(ConfigurationError, match="the model ReLU has no parameters"):
        suggest_zero(torch.nn.ReLU())
