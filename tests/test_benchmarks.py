"""The benchmarks work; what they measure is theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_launch_benchmark_compares_and_judges() -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "launch.py"
    command = [sys.executable, str(script), "local", "imports", "--processes", "2", "--rounds", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    for line in ("warm, 2 processes, local mode", "x torchrun; target at most 0.15: ", "import of the package"):
        assert line in told


@pytest.mark.slow
def test_the_deepspeed_benchmark_compares_with_its_launcher() -> None:
    pytest.importorskip("deepspeed")
    script = Path(__file__).parent.parent / "benchmarks" / "deepspeed.py"
    shape = ["--steps", "3", "--rounds", "1", "--width", "32", "--layers", "1", "--variants", "zero 3"]
    told = subprocess.run(
        [sys.executable, str(script), *shape], capture_output=True, text=True, check=True, timeout=250
    )
    rows = {line[:8].strip(): line[8:].split() for line in told.stdout.splitlines()[-1:]}
    assert set(rows) == {"zero 3"}
    assert all(len(row) == 5 and min(map(float, row)) > 0 for row in rows.values())
