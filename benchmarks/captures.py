"""Measure what it costs that a function captures a large array: seconds, and memory of the driver and of its node.

    python benchmarks/captures.py                              # local mode, executors, PySpark's distributor
    python benchmarks/captures.py local --before ../old        # another checkout of this package takes its turn, too

Each system has a driver of its own, and the drivers take turns. Memory is the highest sum of proportional shares
(proc(5), Pss), without the JVM; the driver's includes the array itself.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy

CASES = ("local", "executors", "PySpark")
ROOT = Path(__file__).resolve().parent.parent
MARK = "CAPTURES_DRIVER"  # in the environment of all processes of a driver


def capturing(mebibytes: int) -> Any:
    array = numpy.random.default_rng(0).integers(0, 255, mebibytes << 20, dtype=numpy.uint8)

    def train() -> int:
        return int(array[:: 1 << 12].sum())  # one byte of each page

    return train


def drive(case: str, mebibytes: int, processes: int) -> None:
    """Answer each line of standard input with the seconds of a run."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if case != "local":
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
        builder.config("spark.driver.memory", "4g").getOrCreate().sparkContext.setLogLevel("OFF")
    if case == "PySpark":
        from pyspark.ml.torch.distributor import TorchDistributor

        run: Any = TorchDistributor(processes, False, False).run
    else:
        from distributor import TorchDistributor as Ours

        run = Ours(processes, case == "local", False, logs="none", progress=False).run
    train = capturing(mebibytes)
    expected = train()
    for _ in sys.stdin:
        start = time.perf_counter()
        value = run(train)
        seconds = time.perf_counter() - start
        assert value == expected, value
        print(seconds, file=answers, flush=True)


class Driver:
    """A driver process, and the memory of all processes that it has started."""

    def __init__(self, case: str, folder: Path, mebibytes: int, processes: int) -> None:
        self.peaks = {"driver": 0, "node": 0, "together": 0}
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        self._is_ours: dict[int, bool] = {}
        environ = {**os.environ, "PYTHONPATH": str(folder.resolve()), "PYSPARK_PYTHON": sys.executable}
        command = [sys.executable, __file__, case, "--drive", "--mib", str(mebibytes), "--processes", str(processes)]
        self._process = subprocess.Popen(
            command,
            env={**environ, MARK: self._mark.partition("=")[2]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,))
        thread.start()
        print(file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        over.set()
        thread.join()
        if not answer:
            raise RuntimeError("the driver ended")
        return float(answer)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.05):
            shares = {pid: share(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._has(pid)}
            own, everything = shares.get(self._process.pid, 0), sum(shares.values())
            for name, size in (("driver", own), ("node", everything - own), ("together", everything)):
                self.peaks[name] = max(self.peaks[name], size)

    def _has(self, pid: int) -> bool:
        """Whether a process is the driver's: some are no children of it, such as a warm process."""
        if pid not in self._is_ours:
            self._is_ours[pid] = False
            with suppress(OSError):
                self._is_ours[pid] = self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return self._is_ours[pid]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def share(pid: int) -> int:
    with suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() == "java":
            return 0
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        return int(dict(line.split(":") for line in lines)["Pss"].split()[0]) << 10
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--mib", type=int, default=320)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", help="another checkout of this package to compare with")
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.cases[0], options.mib, options.processes)
        return
    print(
        f"an array of {options.mib} MiB, {options.processes} ranks, {os.cpu_count()} CPUs: first run, median later run"
    )
    for case in options.cases or CASES:
        folders = {case: ROOT}
        if options.before is not None and case != "PySpark":
            folders[f"{case}, before"] = Path(options.before)
        drivers = {name: Driver(case, folder, options.mib, options.processes) for name, folder in folders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in drivers}
        for _ in range(options.rounds + 1):
            for name, driver in drivers.items():
                seconds[name].append(driver.run())
        for name, driver in drivers.items():
            driver.close()
            peaks = ", ".join(f"{which} {peak / (options.mib << 20):.2f} x" for which, peak in driver.peaks.items())
            later = statistics.median(seconds[name][1:])
            print(f"    {name:<18} {seconds[name][0]:6.2f} s {later:6.2f} s   {peaks}", flush=True)


if __name__ == "__main__":
    main()
