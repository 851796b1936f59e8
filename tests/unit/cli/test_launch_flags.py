"""Which launch path a command line selects."""

from __future__ import annotations

from typing import Any

import pytest
from fake_distributor import Fake

from distributor.cli import command
from distributor.launch import Accelerate, DeepSpeed
from distributor.launch.torchrun import Torchrun


@pytest.mark.parametrize(
    ("options", "launch"),
    [
        ("--accelerate fsdp.yaml", Accelerate("fsdp.yaml")),
        ("--launch accelerate", Accelerate()),
        ("--launch accelerate --accelerate fsdp.yaml", Accelerate("fsdp.yaml")),
        ("--script-arguments trainer --deepspeed ds.json", DeepSpeed("ds.json", script_arguments="trainer")),
        ("--launch deepspeed", DeepSpeed()),
        ("", Torchrun()),
    ],
)
def test_a_file_chooses_the_launch_path(fake: type[Fake], options: str, launch: Any) -> None:
    assert command.call(["run", "-n", "2", *options.split(), "train.py"]) == 0
    assert fake.asked[1]["launch"] == launch


def test_deepspeeds_options_without_launch_select_it(fake: type[Fake]) -> None:
    assert command.call(["run", "-n", "2", "--deepspeed", "ds.json", "--script-arguments", "none", "train.py"]) == 0
    assert fake.asked[0] == (2, True, True)
    assert fake.asked[1]["launch"] == DeepSpeed("ds.json", script_arguments=False)


@pytest.mark.parametrize(("name", "launch"), [("torchrun", Torchrun()), ("deepspeed", DeepSpeed())])
def test_a_launch_path_by_its_name(name: str, launch: Any, fake: type[Fake]) -> None:
    assert command.call(["run", "--launch", name, "train.py"]) == 0
    assert fake.asked[1]["launch"] == launch


def test_one_launch_path_at_a_time(fake: type[Fake], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.call(["run", "--launch", "torchrun", "--deepspeed", "ds.json", "train.py"]) == 2
    assert "--launch torchrun takes no --deepspeed ds.json: leave one of them out" in capsys.readouterr().err
