"""Measure what live logs cost a rank: compare a plain process that writes to a file with a rank of the distributor.

First, both write lines of 60 bytes at a given rate, with work in between, like a training loop that prints very much.
Then both write as fast as they can. The slow-down is the extra time that the rank takes. The two take turns; medians
are printed. Run it on an idle machine:

    python benchmarks/logs.py --lines 500000 --rate 100000 --rounds 5
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TEXT = "x" * 50


def _spins(seconds: float) -> int:
    """Return the number of empty loops that take the time of a line, less about 2 microseconds for writing the line."""
    count = 2_000_000
    start = time.perf_counter()
    for _ in range(count):
        pass
    return int(max(0.0, seconds - 2e-6) / ((time.perf_counter() - start) / count))


def into_a_file(lines: int, spins_per_line: int, path: str) -> float:
    """Write lines in a separate process, to a file, line-buffered like a rank's output. Return the seconds."""
    code = f"import logs, sys; sys.stdout.reconfigure(line_buffering=True); logs.timed({lines}, {spins_per_line})"
    with open(path, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=out,
            stderr=subprocess.PIPE,
            check=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
    return float(done.stderr)


def timed(lines: int, spins: int) -> float:
    """Write lines with a number of empty loops before each. Print the seconds to stderr, and return them."""
    out = sys.stdout
    start = time.perf_counter()
    for number in range(lines):
        for _ in range(spins):
            pass
        out.write(f"{number:8d} {TEXT}\n")
    out.flush()
    seconds = time.perf_counter() - start
    sys.stderr.write(f"{seconds}")
    return seconds


def main() -> None:
    from distributor import TorchDistributor

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=500_000)
    parser.add_argument("--rate", type=float, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, Python {platform.python_version()}, {options.lines} lines, {options.rounds} rounds")
    print(f"{'':<26}{'file, lines/s':>15}{'rank, lines/s':>15}{'slow-down':>11}{'lines in log_dir':>18}")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        for name, rate in ((f"{options.rate:,.0f} lines/s", options.rate), ("as fast as it can", 0.0)):
            spins = _spins(1 / rate) if rate else 0
            alone, ranks, kept = [], [], 0
            for _ in range(options.rounds):
                alone.append(into_a_file(options.lines, spins, os.path.join(folder, "alone")))
                shown, sys.stdout = sys.stdout, nowhere
                try:
                    run = TorchDistributor(1, True, False, log_dir=folder).submit(timed, options.lines, spins)
                    ranks.append(run.result())
                finally:
                    sys.stdout = shown
                assert run.log_folder is not None
                kept = (run.log_folder / "rank-0.stdout").read_bytes().count(b"\n")
            file, rank = statistics.median(alone), statistics.median(ranks)
            print(
                f"{name:<26}{options.lines / file:>15,.0f}{options.lines / rank:>15,.0f}"
                f"{rank / file - 1:>10.1%}{kept:>18,}"
            )


if __name__ == "__main__":
    main()
