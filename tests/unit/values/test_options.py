"""Groups of options check themselves, and hold what was given in one form."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributor.errors import ConfigurationError
from distributor.values.options import (
    Deadlines,
    Group,
    Network,
    Output,
    Project,
    Resources,
    Startup,
    Variables,
    declared,
)

GROUPS = (Resources, Deadlines, Output, Startup, Variables, Project, Network)


@pytest.mark.parametrize(
    ("group", "given", "kept"),
    [
        (Resources, {"memory_per_process": "8g"}, {"memory_per_process": 8 << 30}),
        (Resources, {"gpus_per_process": 2}, {"gpus_per_process": 2, "gpus_each": 2}),
        (Resources, {}, {"gpus_per_process": None, "gpus_each": 1}),
        (Deadlines, {"grace_period": 3, "stall_timeout": 60}, {"grace_period": 3.0, "stall_timeout": 60.0}),
        (Output, {}, {"logs": "all", "log_ranks": None, "keep_logs": False}),
        (Output, {"logs": "rank0"}, {"logs": (0,), "log_ranks": (0,)}),
        (Output, {"logs": "none"}, {"logs": (), "log_ranks": ()}),
        (Output, {"logs": [0, 3]}, {"logs": (0, 3), "log_ranks": (0, 3)}),
        (Output, {"log_dir": "logs"}, {"log_dir": Path("logs"), "keep_logs": True}),
        (Startup, {"preload": ["transformers"]}, {"preload": ("transformers",)}),
        (Variables, {}, {"env": {}, "forward_env": ()}),
        (Variables, {"forward_env": ["W_*"]}, {"forward_env": ("W_*",)}),
        (Project, {"working_dir": "."}, {"working_dir": Path(".")}),
        (Network, {"driver_ports": [4700, 4710]}, {"driver_ports": (4700, 4710)}),
    ],
)
def test_a_value_is_held_in_one_form(group: Any, given: dict[str, Any], kept: dict[str, Any]) -> None:
    made = group(**given)
    assert {name: getattr(made, name) for name in kept} == kept
    assert replace(made) == made, "what a check has returned does not pass it unchanged"


@pytest.mark.parametrize(
    ("group", "given", "told"),
    [
        (Deadlines, {"grace_period": "10"}, "grace_period must be a number of seconds from 0 to a year, not '10'"),
        (
            Deadlines,
            {"heartbeat_timeout": 0},
            "heartbeat_timeout must be a number of seconds from 1 to a year, not 0",
        ),
        (
            Resources,
            {"use_gpu": False, "gpus_per_process": 1},
            "gpus_per_process=1 contradicts use_gpu=False: leave one of them out",
        ),
        (Resources, {"gpus_per_process": float("inf")}, "gpus_per_process must be a whole number, not inf"),
        (Startup, {"start_method": ["fork"]}, "start_method must be 'fork' or 'spawn', not ['fork']"),
        (Startup, {"preload": ["a"], "keep_warm": 0}, "preload=['a'] needs a warm process"),
        (Output, {"logs": None}, "logs must be 'all', 'rank0', 'none' or a list of ranks, not None"),
        (Variables, {"env": {"RANK": "1"}}, "env sets RANK, which the run sets for each rank: leave it out"),
    ],
)
def test_a_group_checks_itself(group: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        group(**given)
    assert told in str(caught.value)


def test_a_change_is_checked_too() -> None:
    with pytest.raises(ConfigurationError, match="preload=\\['a'\\] needs a warm process"):
        replace(Startup(preload=("a",)), start_method="spawn")


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(Variables(env={"TOKEN": "hunter2"}))


@pytest.mark.parametrize("group", GROUPS)
def test_defaults_are_valid_and_travel(group: type[Group]) -> None:
    made = group()
    assert pickle.loads(pickle.dumps(made)) == made
    assert declared(group)
