"""Seconds from call to result of a function that does one all-reduce: here, torchrun, and PySpark's distributor.

The systems take turns in one process; medians and ratios are printed with versions. Run it on an idle machine:

    python benchmarks/launch.py --processes 2 8 --rounds 3
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
from collections.abc import Callable
from pathlib import Path

os.environ["PYSPARK_PYTHON"] = sys.executable

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def train() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def main() -> None:
    import pyspark
    import torch
    from pyspark.ml.torch.distributor import TorchDistributor as PySparkDistributor
    from pyspark.sql import SparkSession

    from distributor import TorchDistributor

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    most = max(options.processes)
    spark = (
        SparkSession.builder.master(f"local[{most}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    print(f"{os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}, ", end="")
    print(f"PySpark {pyspark.__version__}, {options.rounds} rounds in turn after one that is not counted; medians")
    print(f"{'processes':>9}  {'system':<28} {'seconds':>8}  {'min-max':>13}  of PySpark  of torchrun")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        for count in options.processes:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            systems: dict[str, Callable[[], object]] = {
                "distributor, this machine": lambda n=count: TorchDistributor(n, True, False).run(train),
                "distributor, executors": lambda n=count: TorchDistributor(n, False, False).run(train),
                "torchrun --standalone": lambda command=torchrun: subprocess.run(
                    [*command, str(script)], check=True, capture_output=True
                ),
                "PySpark, executors": lambda n=count: PySparkDistributor(n, False, False).run(train),
            }
            seconds: dict[str, list[float]] = {name: [] for name in systems}
            for round_number in range(options.rounds + 1):
                for name, system in systems.items():
                    start = time.perf_counter()
                    system()
                    if round_number > 0:
                        seconds[name].append(time.perf_counter() - start)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            for name, median in medians.items():
                span = f"{min(seconds[name]):.1f}-{max(seconds[name]):.1f}"
                print(
                    f"{count:>9}  {name:<28} {median:>8.2f}  {span:>13}"
                    f"  {median / medians['PySpark, executors']:>10.2f}"
                    f"  {median / medians['torchrun --standalone']:>11.2f}"
                )
    spark.stop()


if __name__ == "__main__":
    main()
