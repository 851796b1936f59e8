"""What ``--space`` chooses from."""

from __future__ import annotations

from typing import Any

import pytest

from distributor.cli.sweep_options import read_space


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("width=32,64", [32, 64]),
        ("lr=0.1,1", [0.1, 1]),
        ("snapshot=2024_01,2024_02", ["2024_01", "2024_02"]),
        ("fold=00,01", ["00", "01"]),
        ("version=1.10,1.20", ["1.10", "1.20"]),
        ("rate=1e-4,1e5", ["1e-4", "1e5"]),
    ],
)
def test_a_script_gets_what_was_written(text: str, values: list[Any]) -> None:
    assert read_space([text]) == {text.partition("=")[0]: values}
