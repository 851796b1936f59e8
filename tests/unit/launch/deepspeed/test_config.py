"""DeepSpeed's configuration as data: what is refused and filled."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from distributor import ConfigurationError, DeepspeedTorchDistributor, zero
from distributor.launch import DeepSpeed
from distributor.launch.deepspeed import config as deepspeed_config, reading
from distributor.launch.deepspeed.config import ACCUMULATION, AUTO, MICRO, TRAIN

ADAM = {"type": "AdamW", "params": {}}


def refused(config: dict[str, Any], world_size: int = 4) -> str:
    """Why a configuration is refused before anything starts."""
    with pytest.raises(ConfigurationError) as caught:
        DeepspeedTorchDistributor(world_size, 1, True, False, config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"zero_optimization": {"stage": 4}},
            "zero_optimization.stage is 4, but must be one of these stages (in brackets: what each splits",
        ),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage is '3'"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is True"),
        ({"zero_optimization": {"stage": [1, 2]}}, "zero_optimization.stage is [1, 2], but must be one of"),
        ({"zero_optimization": {"stage": {"a": 1}}}, "zero_optimization.stage is {'a': 1}, but must be one of"),
        ({"zero_optimization": 3}, "zero_optimization must be a mapping, not int 3"),
        (
            {"zero_optimisation": {"stage": 1}},
            "'zero_optimisation', which DeepSpeed would silently ignore: did you mean",
        ),
        ({"train_micro_batch_size": 4}, "did you mean 'train_micro_batch_size_per_gpu'?"),
        ({"batch_size": 4}, "did you mean 'train_batch_size'?"),
        ({"lr": 4}, "did you mean 'optimizer.params.lr'?"),
        ({"zero": {"stage": 1}}, "did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"reduce_bucket_sizes": 1}}, "did you mean 'reduce_bucket_size'"),
        ({"zero_optimization": {"offload_optimiser": {}}}, "did you mean 'offload_optimizer'?"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "params.lr must be a number, not '1e-3'"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "has 'learning_rate': did you mean 'lr'?"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "enables both fp16 and bf16: choose one of them"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled must be true or false, not 'yes'"),
        ({"bf16": True}, "bf16 must be a mapping, not bool True"),
        ({TRAIN: 0}, "train_batch_size must be a positive integer, not 0"),
        ({MICRO: 2.5}, "train_micro_batch_size_per_gpu must be a positive integer, not 2.5"),
        ({ACCUMULATION: True}, "gradient_accumulation_steps must be a positive integer, not True"),
        (
            {TRAIN: 100, MICRO: 8, ACCUMULATION: 3},
            "100 is not 8 (train_micro_batch_size_per_gpu) x 3 (gradient_accumulation_steps) x 4 ranks "
            '= 96. If the model is split over ranks, the configuration must say so, as in "pipeline": {"stages": 2}',
        ),
        ({TRAIN: 30, MICRO: 8}, "30 is not a multiple of 8 (train_micro_batch_size_per_gpu) x 4 ranks = 32"),
        ({TRAIN: 30}, "train_batch_size 30 is not a multiple of 4 ranks = 4"),
        (
            {TRAIN: 10, MICRO: 8, ACCUMULATION: 1, "pipeline": {"stages": 2}},
            "10 is not 8 (train_micro_batch_size_per_gpu) x 1 (gradient_accumulation_steps) x 4 ranks / 2 "
            "(pipeline.stages) = 16",
        ),
        ({"pipeline": {"stages": 3}}, "pipeline.stages is 3, which does not divide 4 ranks"),
        ({"tensor_parallel": {"autotp_size": -1}}, "tensor_parallel.autotp_size must be a positive integer, not -1"),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "needs ZeRO stage 1 or more, not 0",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "offload_param with device 'cpu' needs ZeRO stage 3",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
            "offload_optimizer with device 'nvme' needs ZeRO stage 3, not 2",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "needs an nvme_path, a folder on"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}},
            "'none', 'cpu' or 'nvme', not 'disk'",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offload_optimizer.ratio is 0.5: a ratio below 1 (only a part is offloaded) needs ZeRO stage 3, not 2",
        ),
        ({"optimizer": {"params": {}}}, "optimizer.type must be a name such as 'AdamW', not None"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "use 'gradient_clipping' instead"),
        ({"steps_per_print": float("inf")}, "steps_per_print is inf, which JSON cannot express"),
        ({"optimizer": {"type": "Adam", "params": {"lr": object()}}}, "optimizer.params.lr is a builtins.object; only"),
        ({"comment": [{3: 4}]}, "the key 3 in comment[0] must be a string, not int"),
        (
            {"steps_per_print": AUTO},
            "steps_per_print is 'auto', but no value can be derived for it: replace 'auto' with a value",
        ),
    ],
)
def test_mistakes_in_a_configuration_are_refused(config: dict[str, Any], text: str) -> None:
    assert text in refused(config)


@pytest.mark.parametrize(
    ("auto", "text"),
    [
        ({"lr": 1}, "auto= does not accept the name 'lr': use one of micro_batch_size, "),
        ({"micro_batch_size": 0}, "auto: micro_batch_size must be a positive integer, not 0"),
        ({"hidden_size": "big"}, "auto: hidden_size must be a positive integer, not 'big'"),
        ({"precision": "fp8"}, "auto: precision must be 'fp32' or 'fp16' or 'bf16', not 'fp8'"),
        ({"micro_batch_size": 2}, "batch_size_per_gpu is 4, which contradicts auto={'micro_batch_size': ...}"),
        ({"learning_rate": 2.0}, "optimizer.params.lr is 1.0, which contradicts auto={'learning_rate': ...}"),
    ],
)
def test_wrong_values_of_auto_are_refused(auto: dict[str, Any], text: str) -> None:
    config = {MICRO: 4, "optimizer": {"type": "Adam", "params": {"lr": 1.0}}}
    with pytest.raises(ConfigurationError) as caught:
        DeepspeedTorchDistributor(2, 1, True, False, config, auto=auto)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "auto", "expected"),
    [
        ((AUTO, 4, 2), {}, (32, 4, 2)),
        ((AUTO, 4, None), {}, (16, 4, None)),
        ((64, AUTO, 2), {}, (64, 8, 2)),
        ((64, AUTO, None), {}, (64, 16, None)),
        ((64, 4, AUTO), {}, (64, 4, 4)),
        ((64, AUTO, AUTO), {}, (64, 16, 1)),
        ((64, AUTO, AUTO), {"micro_batch_size": 2}, (64, 2, 8)),
        ((AUTO, AUTO, AUTO), {}, (32, 8, 1)),
        ((AUTO, AUTO, AUTO), {"micro_batch_size": 2, "gradient_accumulation_steps": 3}, (24, 2, 3)),
        ((AUTO, None, None), {}, (32, None, None)),
        ((AUTO, None, None), {"micro_batch_size": 2, "gradient_accumulation_steps": 3}, (24, None, None)),
        ((AUTO, 4, None), {"gradient_accumulation_steps": 3}, (48, 4, None)),
        ((64, None, AUTO), {"micro_batch_size": 4}, (64, None, 4)),
        ((64, AUTO, None), {"gradient_accumulation_steps": 2}, (64, 8, None)),
        ((None, AUTO, None), {}, (None, 8, None)),
        ((AUTO, 4, "null"), {}, (16, 4, None)),
    ],
)
def test_batch_sizes_follow_from_each_other(sizes: Any, auto: dict[str, Any], expected: Any) -> None:
    config = {name: size for name, size in zip((TRAIN, MICRO, ACCUMULATION), sizes) if size is not None}
    config = {name: None if size == "null" else size for name, size in config.items()}
    final = deepspeed_config.fill(config, 4, auto)
    deepspeed_config.check(final, 4)
    assert tuple(final.get(name) for name in (TRAIN, MICRO, ACCUMULATION)) == expected


@pytest.mark.parametrize("sizes", [(30, AUTO, 2), (30, 4, AUTO)])
def test_batch_sizes_that_do_not_follow(sizes: Any) -> None:
    text = refused(dict(zip((TRAIN, MICRO, ACCUMULATION), sizes)))
    assert "train_batch_size 30 is not a multiple of" in text


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 8), st.sets(st.sampled_from([TRAIN, MICRO, ACCUMULATION])))
def test_every_filled_configuration_is_accepted(world_size: int, micro: int, steps: int, unknown: set[str]) -> None:
    config: dict[str, Any] = {TRAIN: micro * steps * world_size, MICRO: micro, ACCUMULATION: steps}
    config |= dict.fromkeys(unknown, AUTO)
    deepspeed_config.check(config, world_size)
    final = deepspeed_config.fill(config, world_size, {})
    deepspeed_config.check(final, world_size)
    assert final[TRAIN] == final[MICRO] * final[ACCUMULATION] * world_size
    assert {name: final[name] for name in config if name not in unknown} == {
        name: size for name, size in config.items() if name not in unknown
    }


FULL: dict[str, Any] = {
    "gradient_clipping": AUTO,
    "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
    },
    "fp16": {"enabled": AUTO},
    "bf16": {"enabled": AUTO},
    "pipeline": {"stages": AUTO},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
        "sub_group_size": AUTO,
    },
}


def test_auto_is_filled_as_hugging_face_does() -> None:
    final = deepspeed_config.fill(FULL, 2, {"hidden_size": 100, "learning_rate": 3e-4, "precision": "bf16"})
    assert final["optimizer"]["params"] == {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert final["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 1}
    assert (final["fp16"]["enabled"], final["bf16"]["enabled"], final["gradient_clipping"]) == (False, True, 1.0)
    zero = final["zero_optimization"]
    assert zero["reduce_bucket_size"] == 100 * 100
    assert zero["stage3_prefetch_bucket_size"] == 9000
    assert zero["stage3_param_persistence_threshold"] == 1000
    # DeepSpeed takes these two for its defaults.
    assert (zero["sub_group_size"], final["pipeline"]["stages"]) == (AUTO, AUTO)


@pytest.mark.slow
def test_the_defaults_are_those_of_hugging_face_and_deepspeed() -> None:
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    transformers = pytest.importorskip("transformers")
    final = deepspeed_config.fill({**FULL, MICRO: AUTO, ACCUMULATION: AUTO}, 2, {})
    theirs = transformers.TrainingArguments(use_cpu=True)
    params = final["optimizer"]["params"]
    assert (params["lr"], params["weight_decay"], params["eps"]) == (
        *(theirs.learning_rate, theirs.weight_decay, theirs.adam_epsilon),
    )
    assert params["betas"] == [theirs.adam_beta1, theirs.adam_beta2]
    assert (final[MICRO], final[ACCUMULATION]) == (
        *(theirs.per_device_train_batch_size, theirs.gradient_accumulation_steps),
    )
    assert final["gradient_clipping"] == theirs.max_grad_norm
    default = zero_config.DeepSpeedZeroConfig(stage=3)
    zero = final["zero_optimization"]
    assert zero["reduce_bucket_size"] == default.reduce_bucket_size
    assert zero["stage3_prefetch_bucket_size"] == default.prefetch_bucket_size
    assert zero["stage3_param_persistence_threshold"] == default.param_persistence_threshold


def test_the_number_of_steps_is_left_to_the_trainer() -> None:
    """Its own configurations have "auto" there; whoever else asks for the configuration is told."""
    config = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": AUTO, "warmup_num_steps": AUTO}}}
    final = deepspeed_config.fill(config, 2, {})
    assert deepspeed_config.unfilled(final) == ["scheduler.params.total_num_steps"]
    final = deepspeed_config.fill(config, 2, {"total_steps": 100})
    assert deepspeed_config.unfilled(final) == []
    assert final["scheduler"]["params"] == {"total_num_steps": 100, "warmup_num_steps": 1}


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"type": "Lion"}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1, "cpu_offload": True}},
        {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}, "zero_optimization": {"stage": 1}},
        {"zero_optimization": True},
        {"my_own_section": {"a": 1}},
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95]}}},
    ],
)
def test_what_deepspeed_takes_is_not_refused(config: dict[str, Any]) -> None:
    DeepspeedTorchDistributor(2, 1, True, False, config, auto={"betas": (0.9, 0.95)})


def test_the_old_name_of_bf16() -> None:
    config = reading.read({"bfloat16": {"enabled": True}})
    assert deepspeed_config.precision(config) == "bf16"
    assert "enables both fp16 and bf16" in refused({"bfloat16": {"enabled": True}, "fp16": {"enabled": True}})


def test_auto_stays_for_values_that_only_a_library_knows() -> None:
    left = deepspeed_config.fill({**FULL, TRAIN: AUTO}, 2, {"learning_rate": 3e-4, "hidden_size": 10}, guess=False)
    assert left["optimizer"]["params"] == {"lr": 3e-4, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}
    assert left["zero_optimization"]["reduce_bucket_size"] == 100
    assert (left[TRAIN], left["gradient_clipping"], left["bf16"]["enabled"]) == (AUTO, AUTO, AUTO)


@pytest.mark.parametrize(
    ("config", "use_gpu", "expected"),
    [
        ({}, False, ["ShareMemComm"]),
        ({}, True, []),
        ({"optimizer": ADAM}, True, ["FusedAdam"]),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, True, []),
        ({"optimizer": {"type": "Lion"}}, True, ["FusedLion"]),
        ({"optimizer": {"type": "Lamb"}}, True, ["FusedLamb"]),
        ({"optimizer": {"type": "Adagrad"}}, True, []),
        ({"optimizer": ADAM, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, True, ["CPUAdam"]),
        ({"optimizer": ADAM, "zero_optimization": {"cpu_offload": True}}, False, ["ShareMemComm", "CPUAdam"]),
        ({"optimizer": {"type": "Lion"}, "zero_optimization": {"cpu_offload": True}}, True, ["CPULion"]),
        ({"optimizer": {"type": "Adagrad"}, "zero_optimization": {"cpu_offload": True}}, True, ["CPUAdagrad"]),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, True, ["AsyncIO"]),
        ({"zero_optimization": True}, True, []),
    ],
)
def test_extensions_that_a_configuration_needs(config: dict[str, Any], use_gpu: bool, expected: list[str]) -> None:
    assert deepspeed_config.extensions(config, use_gpu) == tuple(f"{name}Builder" for name in expected)


def test_the_names_of_extensions_are_deepspeeds() -> None:
    builders = pytest.importorskip("deepspeed.ops.op_builder")
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    assert ShareMemCommBuilder
    for name in ("CPUAdam", "FusedAdam", "CPULion", "FusedLion", "CPUAdagrad", "FusedLamb", "AsyncIO"):
        assert hasattr(builders, f"{name}Builder")


def test_no_batch_size_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The function may add one."""
    DeepspeedTorchDistributor(2, 1, True, False, {"bf16": {"enabled": True}})
    assert "has no batch size, which deepspeed.initialize requires: add" in caplog.text


def test_names_that_deepspeed_has_are_not_taken_for_slips() -> None:
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    fields = zero_config.DeepSpeedZeroConfig.model_fields
    names = [*fields, *(field.alias for field in fields.values() if field.alias)]
    deepspeed_config.check({"zero_optimization": {name: 0 for name in names if not name.startswith("offload")}}, 2)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nodes_get_the_stage_and_the_precision(stage: int, precision: str) -> None:
    resolved = DeepSpeed(zero(stage, precision=precision, torch_adam=True)).resolve(2, False).resolved  # type: ignore[arg-type]
    assert resolved is not None
    assert (resolved.stage, resolved.precision) == (stage, precision)
    assert "auto" not in resolved.final
    assert "auto" in resolved.given
