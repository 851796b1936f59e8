"""What checks of single values keep; tests/test_configuration.py has their errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distributor.errors import ConfigurationError
from distributor.values import checks
from distributor.values.checks import Check

numpy = pytest.importorskip("numpy")


@pytest.mark.parametrize(
    ("check", "value", "kept"),
    [
        (checks.check_count, numpy.int64(3), 3),
        (checks.check_range, 4, (4, 4)),
        (checks.check_range, [2, numpy.int32(4)], (2, 4)),
        (checks.check_gpus, 2, 2),
        (checks.check_title, "  gpt 2 ", "gpt 2"),
        (checks.check_memory, "8g", 8 << 30),
        (checks.check_memory, 1_000_000, 1_000_000),
        (checks.check_flag, numpy.bool_(True), True),
        (checks.check_flag, 0, False),
        (checks.check_choice, None, None),
        (checks.check_path, "a/b", Path("a/b")),
        (checks.check_place, Path("/runs"), "/runs"),
        (checks.check_place, "file:///runs", "file:///runs"),
        (checks.check_place, "C:/runs", "C:/runs"),
        (checks.check_patterns, ["WANDB_*"], ("WANDB_*",)),
        (checks.check_env, {"SEED": "1"}, {"SEED": "1"}),
        (checks.check_logs, "all", "all"),
        (checks.check_logs, "rank0", (0,)),
        (checks.check_logs, "none", ()),
        (checks.check_logs, [2, 0], (2, 0)),
        (checks.check_logs, numpy.arange(2), (0, 1)),
        (partial(checks.check_seconds, least=0), numpy.int64(60), 60.0),
        (checks.check_ports, [7000, 7001], (7000, 7001)),
        (checks.check_modules, ["torch.nn"], ("torch.nn",)),
        (checks.optional(checks.check_count), None, None),
        (checks.one_of("fork", "spawn"), "fork", "fork"),
    ],
)
def test_a_value_is_kept_in_one_form(check: Check, value: Any, kept: Any) -> None:
    assert check("option", value) == kept
    assert type(check("option", value)) is type(kept)


def test_the_values_of_variables_are_in_no_error() -> None:
    for env in ({"A=B": "secret"}, {"RANK": "secret"}, {1: "secret"}, {"A": b"secret"}):
        with pytest.raises(ConfigurationError) as caught:
            checks.check_env("env", env)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "number", "whole"),
    [
        (3, 3, 3),
        (numpy.float32(0.5), 0.5, None),
        (numpy.array([4]), 4, 4),
        (numpy.array([1, 2]), None, None),
        (float("inf"), float("inf"), None),
        ("3", None, None),
    ],
)
def test_numbers_in_arrays_are_found(value: Any, number: float | None, whole: int | None) -> None:
    assert checks.as_number(value) == number
    assert checks.as_whole(value) == whole
