"""The benchmarks work; what they measure is theirs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(name: str, *arguments: str) -> str:
    """What a benchmark prints."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.long
def test_the_launch_benchmark_compares_with_torchrun() -> None:
    output = run("launch.py", "local", "imports", "--processes", "2", "--rounds", "1")
    for line in ("warm, 2 processes, local mode", "x torchrun; target at most 0.15: ", "import of the package"):
        assert line in output


@pytest.mark.long
def test_the_benchmark_of_captured_arrays_measures_time_and_memory() -> None:
    output = run("captures.py", "local", "--mib", "16", "--rounds", "1", "--before", str(BENCHMARKS.parent))
    for name in ("local ", "local, before"):
        assert re.search(rf"^ +{name} .* s .* s +driver .* x, node .* x, together .* x$", output, re.MULTILINE)


@pytest.mark.long
def test_the_data_benchmark_compares_with_peers() -> None:
    output = run("data.py", "--rows", "30000", "--rounds", "1", "--spark")
    for name in ("gather", "ours", "plain", "pysparks", "resume", "memory", "ours, two ranks", "write.parquet"):
        assert re.search(rf"^{name} +[0-9.e+-]+ (M rows/s|s|MB) ", output, re.MULTILINE), name


@pytest.mark.long
def test_the_steps_benchmark_pairs_systems_and_checkouts() -> None:
    shape = ["compute", "--where", "local", "--rounds", "1", "--steps", "3", "--before", str(BENCHMARKS.parent)]
    output = run("steps.py", *shape)
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line.startswith("    ")}
    assert set(rows) >= {"distributor", "before", "torchrun", "run_cpu"}
    assert "x torchrun; target at least 0.99: " in output


def test_the_readmes_table_is_that_of_the_picture() -> None:
    """``benchmarks/launch.json`` holds what docs/launch.png was drawn from."""
    root = Path(__file__).parent.parent
    points = json.loads((BENCHMARKS / "launch.json").read_text())
    text = (root / "README.md").read_text()
    table = re.findall(r"^\| (.*) \|$", text[text.index("| processes |") :].partition("\n\n")[0], re.MULTILINE)
    counts = table[0].split(" | ")[1:]
    names = ("distributor, local", "distributor, on executors", "torchrun", "PySpark")
    for row, name in zip(table[1:], names, strict=True):
        shown = [None if cell.strip() in ("", "-") else float(cell) for cell in row.split(" | ")[1:]]
        measured = [points[name].get(count) for count in counts]
        for one, other in zip(shown, measured, strict=True):
            assert (one is None) == (other is None)
            assert one is None or one == pytest.approx(other, rel=0.05, abs=0.006), name


@pytest.mark.long
def test_the_deepspeed_benchmark_compares_with_its_launcher(deepspeed: None) -> None:
    shape = ["--steps", "3", "--rounds", "1", "--width", "32", "--layers", "1", "--variants", "zero 3"]
    output = run("deepspeed.py", *shape)
    rows = {line[:8].strip(): line[8:].split() for line in output.splitlines()[-1:]}
    assert set(rows) == {"zero 3"}
    assert all(len(row) == 5 and min(map(float, row)) > 0 for row in rows.values())


@pytest.mark.long
def test_the_goodput_benchmark_calibrates_and_computes() -> None:
    output = run("goodput.py", "--runs", "4", "--nodes", "8", "10000", "--days", "2")
    assert re.search(r"error \d+\.\d %; target at most 5 %: ", output)
    few, many = (re.findall(r"([\d.]+) %", line) for line in output.splitlines()[-2:])
    assert float(few[0]) > float(many[0]) > 0
    assert all(99 < sum(map(float, row)) < 101 for row in (few, many))


@pytest.mark.long
def test_the_recovery_benchmark_compares_and_names_targets() -> None:
    output = run("recovery.py", "--rounds", "1", "--size", "1", "--master", "")
    table = {line[:20].strip(): line[20:].split() for line in output.partition("kill of a")[2].splitlines()[1:]}
    assert set(table) == {"rank, local", "rank, torchrun", "agent, local", "driver, local"}
    for name in ("rank, local", "agent, local", "driver, local"):
        assert table[name][0] == "1/1"
        assert 0 < float(table[name][1]) == float(table[name][2])


@pytest.mark.long
def test_the_checkpoint_benchmark_compares_and_counts_copies() -> None:
    output = run("checkpoint.py", "--rounds", "1", "--size", "8", "--memory")
    assert "8 MiB, 1 rounds, medians" in output
    for end in (r"x the speed of torch\.save", r"copies", r"x those without \([\d.]+\)"):
        assert float(re.search(rf"([\d.]+) {end}", output)[1]) > 0  # type: ignore[index]
