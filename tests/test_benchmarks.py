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
