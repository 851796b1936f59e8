"""What is told before a run starts."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import make_job

from distributor.api.forewarn import deepspeed_on_cpus, fsdp_on_cpus
from distributor.launch import DeepSpeed
from distributor.values.job import Function, Module, Script


def assert_told(told: str | None, asked: str | None, of: str) -> None:
    if asked is None:
        assert told is None
    else:
        assert told is not None and told.startswith(f"{asked} asks for {of}")


@pytest.mark.parametrize(
    ("job", "environ", "asked"),
    [
        pytest.param({"target": Script("train.py", b"", ("--fsdp", "full_shard"))}, {}, "--fsdp", id="argument"),
        pytest.param({"target": Module("train", ("--fsdp=full_shard",))}, {}, "--fsdp", id="argument-of-a-module"),
        pytest.param({"env": {"ACCELERATE_USE_FSDP": "True"}}, {}, "ACCELERATE_USE_FSDP", id="variable"),
        pytest.param({}, {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP", id="inherited"),
        pytest.param({"target": Script("train.py", b"", ("--fsdp_config", "x"))}, {}, None, id="another-argument"),
        pytest.param({"target": Function("train", b"")}, {"ACCELERATE_USE_FSDP": "false"}, None, id="switched-off"),
        pytest.param({"use_gpu": True}, {"ACCELERATE_USE_FSDP": "true"}, None, id="on-gpus"),
    ],
)
def test_fsdp_on_cpus_causes_a_warning(job: dict[str, Any], environ: dict[str, str], asked: str | None) -> None:
    assert_told(fsdp_on_cpus(make_job(**job), environ), asked, "FSDP, for which Accelerate and Transformers")


@pytest.mark.parametrize(
    ("job", "environ", "asked"),
    [
        pytest.param({"target": Script("train.py", b"", ("--deepspeed", "ds.json"))}, {}, "--deepspeed", id="argument"),
        pytest.param({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED", id="inherited"),
        pytest.param({"launch": DeepSpeed()}, {"ACCELERATE_USE_DEEPSPEED": "true"}, None, id="deepspeeds-path"),
        pytest.param({"use_gpu": True}, {"ACCELERATE_USE_DEEPSPEED": "true"}, None, id="on-gpus"),
        pytest.param({}, {}, None, id="nothing"),
    ],
)
def test_deepspeed_on_cpus_without_its_launch_path_causes_a_warning(
    job: dict[str, Any], environ: dict[str, str], asked: str | None
) -> None:
    assert_told(deepspeed_on_cpus(make_job(**job), environ), asked, "DeepSpeed, but with use_gpu=False")
