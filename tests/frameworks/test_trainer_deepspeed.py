"""Transformers' Trainer under DeepSpeed: how its scripts get the configuration, and what is said if they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sessions import LOCAL, MASTERS

from distributor import DeepspeedTorchDistributor, TrainingError, zero

pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("deepspeed")]

#: What Transformers fills in is "auto"; it makes the optimizer.
CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}

#: A script as Transformers' own examples are written.
SCRIPT = """
import sys
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.config = type("Config", (), {"hidden_size": 2, "to_json_string": lambda self: "{}"})()

    def forward(self, x, labels=None):
        y = self.layer(x)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 16
trainer = Trainer(Model(), arguments, train_dataset=data)
trainer.train()
print("trained", arguments.world_size, trainer.is_deepspeed_enabled, type(trainer.model_wrapped).__name__)
"""

#: A script as DeepSpeed's own examples are written.
OWN = """
import argparse, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
print(deepspeed.add_config_arguments(parser).parse_args().deepspeed_config)
"""

PLAIN = """
import argparse
argparse.ArgumentParser().parse_args()
"""


#: Two executors, as a place of a test.
EXECUTORS = MASTERS[-1]


def case(mode: str, *values: Any, id: str) -> Any:
    """A case of a test that has the fixture ``mode``."""
    return pytest.param(mode, *values, id=id, marks=() if mode == LOCAL else pytest.mark.spark)


@pytest.fixture
def run(local: bool, spread: dict[str, Any], tmp_path: Path) -> Any:
    """Runs a script on two ranks: one on each executor, if there are executors."""

    def ran(source: str, *args: str, **options: Any) -> None:
        script = tmp_path / "train.py"
        script.write_text(source)
        DeepspeedTorchDistributor(2, 1, local, False, CONFIG, **spread, **options).run(script, *args)

    return ran


def arguments(tmp_path: Path) -> tuple[str, ...]:
    return ("--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--report_to", "none", "--save_strategy", "no")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "kind", "cpu"),
    [
        case(LOCAL, "trainer", ("--use_cpu", "True"), id="trainer"),
        case(EXECUTORS, "trainer", ("--use_cpu", "True"), id="trainer-executors"),
        pytest.param(LOCAL, False, ("--use_cpu", "True"), id="without-arguments", marks=pytest.mark.long),
        pytest.param(LOCAL, False, ("--ddp_backend", "gloo"), id="without-arguments-gloo", marks=pytest.mark.long),
    ],
    indirect=["mode"],
)
@pytest.mark.framework("Transformers", "transformers", "Trainer with ZeRO-2")
def test_a_trainers_script(
    run: Any, kind: Any, cpu: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(SCRIPT, *arguments(tmp_path), *cpu, script_arguments=kind)
    out = capfd.readouterr().out
    assert out.count("trained 2 True DeepSpeedEngine") == 2, out


@pytest.mark.parametrize(
    ("mode", "source", "kind", "text"),
    [
        case(LOCAL, SCRIPT, "deepspeed", 'script_arguments="trainer" (--script-arguments trainer)', id="trainers"),
        case(
            EXECUTORS,
            SCRIPT,
            "deepspeed",
            'script_arguments="trainer" (--script-arguments trainer)',
            id="trainers-executors",
        ),
        case(LOCAL, OWN, "trainer", 'script_arguments="deepspeed", the default', id="deepspeeds-own"),
        case(LOCAL, PLAIN, "deepspeed", "script_arguments=False (--script-arguments none)", id="neither"),
        case(LOCAL, PLAIN, "trainer", "script_arguments=False (--script-arguments none)", id="neither-as-a-trainers"),
    ],
    indirect=["mode"],
)
def test_what_a_script_does_not_take_is_named_with_what_it_takes(
    run: Any, source: str, kind: Any, text: str, tmp_path: Path
) -> None:
    args = arguments(tmp_path) if source is SCRIPT else ()
    with pytest.raises(TrainingError) as caught:
        run(source, *args, script_arguments=kind)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "kind", "backend"),
    [
        case(LOCAL, False, (), id="local"),
        case(LOCAL, "trainer", ("--ddp_backend", "gloo"), id="local-gloo"),  # ignored beside --deepspeed CONFIG
        case(EXECUTORS, "trainer", (), id="executors"),
    ],
    indirect=["mode"],
)
def test_a_trainer_that_trains_alone_is_advised(run: Any, kind: Any, backend: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"pass use_cpu=True to TrainingArguments \(--use_cpu True\)"):
        run(SCRIPT, *arguments(tmp_path), *backend, script_arguments=kind)


#: Its own batch sizes do not fit two ranks.
SIZES = """
import deepspeed, torch
deepspeed.init_distributed(verbose=False)
config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)
"""


@pytest.mark.parametrize("mode", [case(LOCAL, id="local"), case(EXECUTORS, id="executors")], indirect=True)
def test_batch_sizes_that_do_not_fit_the_ranks_are_explained(run: Any) -> None:
    with pytest.raises(TrainingError, match="Check batch related parameters") as caught:
        run(SIZES, script_arguments=False)
    assert "batch sizes of the configuration must fit each other and the number of ranks" in str(caught.value)


def parse() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.parse_args()


def test_a_function_that_parses_a_command_line() -> None:
    with pytest.raises(TrainingError, match=r"add both with deepspeed.add_config_arguments\(parser\)"):
        DeepspeedTorchDistributor(1, 1, True, False, zero(1, precision="fp32", torch_adam=True)).run(parse)


def test_refuses_wrong_script_arguments() -> None:
    from distributor import ConfigurationError

    with pytest.raises(ConfigurationError, match="script_arguments must be 'deepspeed', 'trainer' or False, not True"):
        DeepspeedTorchDistributor(1, 1, True, False, script_arguments=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="passes a deepspeedConfig to the script, but there is none"):
        DeepspeedTorchDistributor(1, 1, True, False, script_arguments="trainer")
