"""The command's options, as they are made from the declarations."""

from __future__ import annotations

from typing import Any

import pytest
import rich_click as click
from click.testing import CliRunner

from distributor.api.parameters import OPTIONS
from distributor.cli import command
from distributor.cli.flags import arguments
from distributor.values.options import PANELS


def options_of(panel: str) -> list[str]:
    return [max(p.opts, key=len) for p in command.run.params if getattr(p, "panel", None) == panel]


def test_panels_list_what_belongs_together() -> None:
    assert [options_of(panel) for panel in PANELS] == [
        [
            "--module",
            "--launch",
            "--deepspeed",
            "--accelerate",
            "--script-arguments",
            "--parameter-servers",
            "--evaluator",
            "--object-store-memory",
            "--name",
            "--working-dir",
            "--working-dir-limit",
            "--dry-run",
        ],
        ["--num-processes", "--local", "--master", "--conf", "--max-processes-per-node", "--driver-ports"],
        [
            *("--use-gpu", "--gpus-per-process", "--cpus-per-process", "--memory-per-process", "--env"),
            *("--forward-env", "--start-method", "--local-ranks", "--require-group"),
            *("--max-restarts", "--restart-on", "--resume"),
        ],
        [
            *("--output-dir", "--output-limit", "--checkpoints"),
            *("--logs", "--fold-logs", "--prefix", "--log-escapes", "--log-dir", "--progress"),
        ],
        ["--start-timeout", "--grace-period", "--heartbeat-timeout", "--stall-timeout"],
    ]


def test_every_argument_of_the_api_but_these_has_an_option() -> None:
    assert set(OPTIONS) - {parameter.name for parameter in command.run.params} == {
        "local_mode",  # --local and --master say it
        "keep_warm",  # the process of the command ends with the run
        "preload",
        "callbacks",  # objects
        "data",
    }


def test_defaults_are_the_declared_ones() -> None:
    context = command.run.make_context("run", ["train.py"])
    for name, declaration in OPTIONS.items():
        if declaration.flag is not None:
            given = arguments(context.params)[name]
            assert declaration.check(name, given) == declaration.check(name, declaration.default), name


def test_defaults_that_are_no_switch_are_shown() -> None:
    shown = {parameter.name for parameter in command.run.params if getattr(parameter, "show_default", False)}
    timeouts = {"start_timeout", "grace_period", "heartbeat_timeout"}
    words = {"launch", "working_dir_limit", "output_limit", "logs", "start_method", "local_ranks", "restart_on"}
    assert shown == {"num_processes", "max_restarts", *words, *timeouts}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"env": ("A=1", "B=x=y")}, {"env": {"A": "1", "B": "x=y"}}),
        ({"logs": "0,3"}, {"logs": [0, 3]}),
        ({"logs": "rank0"}, {"logs": "rank0"}),
        ({"driver_ports": "4700-4710"}, {"driver_ports": (4700, 4710)}),
        ({"driver_ports": "4700"}, {"driver_ports": (4700, 4700)}),
        ({"driver_ports": None}, {"driver_ports": None}),
        ({"grace_period": 3.0, "deepspeed": "ds.json", "conf": ()}, {"grace_period": 3.0}),
    ],
)
def test_values_of_options_become_arguments(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert arguments(given) == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [({"env": ("A",)}, "--env takes NAME=VALUE"), ({"driver_ports": "9-"}, "--driver-ports takes a port")],
)
def test_text_that_an_option_does_not_take(given: dict[str, Any], told: str) -> None:
    with pytest.raises(click.UsageError, match=told):
        arguments(given)


def test_the_shell_completes_options_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(*words: str) -> list[str]:
        environ = {
            "_DISTRIBUTOR_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["distributor", *words]),
            "COMP_CWORD": str(len(words)),
        }
        told = CliRunner().invoke(
            command.main, prog_name="distributor", env=environ, complete_var="_DISTRIBUTOR_COMPLETE"
        )
        return [line.partition(",")[2] for line in told.output.split()]

    assert completed("run", "--start-") == ["--start-method", "--start-timeout"]
    assert completed("run", "--start-method", "s") == ["spawn"]
    assert completed("run", "--launch", "") == [
        *("torchrun", "accelerate", "deepspeed", "jax", "mpi", "mpi-env", "ray", "tensorflow")
    ]
