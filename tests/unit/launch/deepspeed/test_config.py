"""DeepSpeed's configuration as data: what is read, refused and filled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import trainings
from hypothesis import given, strategies as st

from distributor import ConfigurationError, DeepspeedTorchDistributor, TorchDistributor, zero
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
def test_what_is_refused(config: dict[str, Any], text: str) -> None:
    assert text in refused(config)


@pytest.mark.parametrize(
    ("auto", "text"),
    [
        ({"lr": 1}, "auto= does not accept the name 'lr': use one of micro_batch_size, "),
        ({"micro_batch_size": 0}, "auto: micro_batch_size must be a positive integer, not 0"),
        ({"hidden_size": "big"}, "auto: hidden_size must be a positive integer, not 'big'"),
        ({"precision": "fp8"}, "auto: precision must be 'fp32', 'fp16' or 'bf16', not 'fp8'"),
        ({"micro_batch_size": 2}, "batch_size_per_gpu is 4, which contradicts auto={'micro_batch_size': ...}"),
        ({"learning_rate": 2.0}, "optimizer.params.lr is 1.0, which contradicts auto={'learning_rate': ...}"),
    ],
)
def test_auto_that_is_refused(auto: dict[str, Any], text: str) -> None:
    config = {MICRO: 4, "optimizer": {"type": "Adam", "params": {"lr": 1.0}}}
    with pytest.raises(ConfigurationError) as caught:
        DeepspeedTorchDistributor(2, 1, True, False, config, auto=auto)
    assert text in str(caught.value)


def test_auto_without_a_configuration_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"auto=\{'learning_rate': 1\} fills in a deepspeedConfig, but there is none"
    ):
        DeepspeedTorchDistributor(2, localMode=True, useGpu=False, auto={"learning_rate": 1})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"numGpus": 0}, "numGpus must be a positive integer, not 0"),
        ({"nnodes": "2"}, "nnodes must be a positive integer, not '2'"),
        ({"num_processes": 2}, "num_processes is not an option here: pass numGpus (ranks on each node) and nnodes"),
        ({"use_gpu": False}, "use_gpu is called useGpu here"),
        ({"extensions_timeout": 0}, "extensions_timeout must be a number of seconds from 1 to a year, not 0"),
        ({"deepspeedConfig": 3}, "deepspeedConfig must be a dict or the path of a JSON or YAML file, not int 3"),
        ({"preload": "torch"}, "preload must be a list of module names, not 'torch'"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DeepspeedTorchDistributor(**{"localMode": True, "useGpu": False, **arguments})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", '{"bf16": ', "is malformed: Expecting value: line 1 column 10"),
        ("b.json", "[1]", "must contain a mapping, not list [1]"),
        ("c.json", "stage: 3", "is malformed: Expecting value: line 1 column 1"),
        ("d.json", '{"bf16": {}, "bf16": {}}', "gives 'bf16' twice"),
        ("e.yaml", "bf16: {enabled: [", "is malformed: while parsing"),
        ("f.yaml", "bf16: {}\nbf16: {}", "gives 'bf16' twice"),
        ("j.yaml", "a: &a {lr: 1.0}\nb: {c: &c {<<: *a, lr: 2.0, lr: 3.0}}\nd: {<<: *c}", "gives 'lr' twice"),
        ("g.yml", "- 1", "must contain a mapping, not list [1]"),
        ("h.json", None, "cannot be read on the driver: No such file or directory"),
        ("i.json", b"\xff\xfe", "cannot be read on the driver: 'utf-8' codec"),
    ],
)
def test_files_that_are_refused(name: str, content: str | bytes | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigurationError) as caught:
        DeepspeedTorchDistributor(2, 1, True, False, path)
    assert text in str(caught.value)


def test_yaml_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "ds.yaml").write_text("bf16: {}")
    with pytest.raises(ConfigurationError, match="needs PyYAML on the driver .*: pip install pyyaml, or use JSON"):
        reading.read(tmp_path / "ds.yaml")


def test_json_with_comments_is_read_as_deepspeed_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  // why\n  "train_batch_size": 8, # that many\n}')
    assert reading.read(path) == {TRAIN: 8}
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigurationError, match="is malformed: Expecting property name"):
        reading.read(path)


def test_yaml_is_what_json_would_be(tmp_path: Path) -> None:
    """YAML 1.1 itself takes 5e-5 for a string."""
    path = tmp_path / "ds.yaml"
    path.write_text(
        "base: &base {lr: 5e-5, eps: 1.0e-8, betas: [0.9, 1E+0]}\n"
        "optimizer: {type: Adam, params: {<<: *base, torch_adam: true}}\n"
        "zero_optimization: {stage: 2, reduce_bucket_size: auto}\n"
    )
    config = reading.read(path)
    assert config["optimizer"]["params"] == {"lr": 5e-5, "eps": 1e-8, "betas": [0.9, 1.0], "torch_adam": True}
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": AUTO}


def test_what_merges_may_be_merged_before_it_is_built(tmp_path: Path) -> None:
    """YAML's library builds what is nested last, and writes what a mapping merges into the mapping itself."""
    path = tmp_path / "ds.yaml"
    path.write_text("base: &b {lr: 1.0}\noptimizer: {params: &x {<<: *b, lr: 2.0}}\nother: {<<: *x}\n")
    config = reading.read(path)
    assert config == {"base": {"lr": 1.0}, "optimizer": {"params": {"lr": 2.0}}, "other": {"lr": 2.0}}


def test_what_was_read_is_a_copy() -> None:
    mine = {"optimizer": {"type": "Adam", "params": {"betas": (0.9, 0.99)}}}
    config = reading.read(mine)
    config["optimizer"]["params"]["betas"].append(1)
    assert mine == {"optimizer": {"type": "Adam", "params": {"betas": (0.9, 0.99)}}}


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
def test_whatever_is_filled_is_accepted(world_size: int, micro: int, steps: int, unknown: set[str]) -> None:
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


def test_what_only_a_library_knows_is_left_to_it() -> None:
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


def test_it_shows_itself_as_it_is_made() -> None:
    made = "DeepspeedTorchDistributor(numGpus=2, nnodes=3, localMode=True, useGpu=False)"
    assert repr(DeepspeedTorchDistributor(2, 3, True, False)) == made


def test_pysparks_ways_to_call_it() -> None:
    assert DeepspeedTorchDistributor(4, 2, True, False).num_processes == 8
    assert DeepspeedTorchDistributor(numGpus=True, useGpu=False, localMode=True).num_processes == 1
    assert isinstance(DeepspeedTorchDistributor(useGpu=False), TorchDistributor)
    assert DeepspeedTorchDistributor(useGpu=False, deepspeedConfig={TRAIN: 8}).deepspeed_config == {TRAIN: 8}


def test_another_configuration_leaves_the_first_alone() -> None:
    one = DeepspeedTorchDistributor(2, 1, True, False, {MICRO: 1}, auto={"learning_rate": 1.0}, grace_period=3)
    other = one.with_config({MICRO: 2, TRAIN: AUTO})
    assert (one.deepspeed_config, other.deepspeed_config) == ({MICRO: 1}, {MICRO: 2, TRAIN: AUTO})
    path = other.plan(trainings.rank).launch
    assert isinstance(path, DeepSpeed) and path.deepspeed_config is not None
    assert json.loads(path.deepspeed_config)[TRAIN] == 4
    assert other._options.deadlines.grace_period == 3
    with pytest.raises(ConfigurationError, match="train_batch_size 3 is not a multiple of 2 ranks"):
        one.with_config({TRAIN: 3})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nodes_get_the_stage_and_the_precision(stage: int, precision: str) -> None:
    resolved = DeepSpeed(zero(stage, precision=precision, torch_adam=True)).resolve(2, False).resolved  # type: ignore[arg-type]
    assert resolved is not None
    assert (resolved.stage, resolved.precision) == (stage, precision)
    assert "auto" not in resolved.final
    assert "auto" in resolved.given
