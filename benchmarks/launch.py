"""Compare how long a start takes, and what it costs later, with this package, torchrun, and PySpark's distributor.

The systems take turns in one process tree; medians, ratios and versions are printed. Run it on an idle machine:

    python benchmarks/launch.py                           # every case: two hours on 2 CPUs
    python benchmarks/launch.py executors --processes 2   # some cases, some numbers of processes
    python benchmarks/launch.py local executors --points launch.json   # saves the figures ...
    python benchmarks/launch.py plot --points launch.json --plot launch.png   # ... and draws them
    python benchmarks/launch.py local --before ../old     # another checkout of this package takes its turn, too
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from driver import Checkout

os.environ["PYSPARK_PYTHON"] = sys.executable

#: Sizes of large return values; the second is the default of spark.driver.maxResultSize, in bytes.
VALUE_BYTES, LARGEST_BYTES = 256 << 20, 1 << 30

#: The largest number of processes for which PySpark's distributor takes part. With more processes, it takes minutes,
#: because each process imports torch twice.
PYSPARKS_MOST = 16

#: One all-reduce, as in the function below.
SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def train() -> float:
    """Do one all-reduce, and return the seconds that the process group took."""
    import torch
    import torch.distributed as dist

    start = time.perf_counter()
    dist.init_process_group("gloo")
    seconds = time.perf_counter() - start
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return seconds


def memory() -> int:
    """Return this rank's share of memory in bytes, while all ranks are up (proc(5), smaps_rollup)."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    lines = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    dist.barrier()
    dist.destroy_process_group()
    return int(lines["Pss"].split()[0]) << 10


def large_value(size: int) -> bytes:
    return bytes(size)


def session(master: str) -> Any:
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def ours(processes: int, function: Callable[[], Any] = train, local: bool = False, **options: Any) -> Any:
    from distributor import TorchDistributor

    return TorchDistributor(processes, local, False, logs="none", **options).run(function)


def pysparks(processes: int, function: Callable[[], Any] = train) -> Any:
    from pyspark.ml.torch.distributor import TorchDistributor

    with contextlib.redirect_stdout(io.StringIO()):  # it prints when it starts and ends
        return TorchDistributor(processes, False, False).run(function)


def torchrun(processes: int, *script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    subprocess.run([*command, *script], check=True, capture_output=True)


Systems = dict[str, Callable[[], object]]

#: Seconds by system and number of processes; the number is a string, as in JSON.
Points = dict[str, dict[str, float]]


def medians(systems: Systems, rounds: int) -> dict[str, float]:
    """Return the median seconds of each system's second runs. The systems take turns, each with an uncounted run first.

    The counted run follows at once, since Spark ends Python workers that have been idle for a minute.
    """
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, system in systems.items():
            system()
            start = time.perf_counter()
            system()
            seconds[name].append(time.perf_counter() - start)
    return summary(seconds)


def summary(found: dict[str, list[float]], unit: str = "s") -> dict[str, float]:
    """Print the median, minimum and maximum of each system, and return the medians."""
    for name, values in found.items():
        print(
            f"    {name:<14} {statistics.median(values):8.2f} {unit}  ({min(values):.2f}-{max(values):.2f})", flush=True
        )
    return {name: statistics.median(values) for name, values in found.items()}


def judge(value: dict[str, float], peer: str, target: float, system: str = "distributor") -> None:
    ratio = value[system] / value[peer]
    word = "met" if ratio <= target else "NOT MET"
    print(f"    {ratio:.3f} x {peer}; target at most {target}: {word}", flush=True)


class Bench:
    """The cases of the benchmark; each prints its figures."""

    def __init__(self, options: argparse.Namespace, script: str) -> None:
        self.processes, self.rounds, self.script = options.processes, options.rounds, script
        self.plot_path, self.before, self.points_path = options.plot, options.before, options.points
        self.points: Points = {}
        if self.points_path is not None and Path(self.points_path).exists():
            self.points = json.loads(Path(self.points_path).read_text())

    def _keep(self, found: dict[str, float], count: int, where: str) -> None:
        """Save the systems' seconds, under their names in the picture and in the README's table."""
        for name, seconds in found.items():
            self.points.setdefault(f"{name}, {where}" if name == "distributor" else name, {})[str(count)] = seconds
        if self.points_path is not None:
            Path(self.points_path).write_text(json.dumps(self.points, indent=2) + "\n")

    @contextlib.contextmanager
    def _beside(self, count: int, master: str | None = None) -> Iterator[Systems]:
        """Yield the other checkout as a further system, if the user named one."""
        if self.before is None:
            yield {}
            return
        checkout = Checkout(self.before, master)
        try:
            yield {"before": lambda: checkout.run(count, self.script)}
        finally:
            checkout.close()

    def executors(self) -> None:
        """Measure later runs of a session, on executors."""
        targets = {2: (0.10, 0.25), 16: (0.03, 0.1)}
        for count in self.processes:
            master = f"local[{max(4, count)}]"
            spark = session(master)
            print(f"warm, {count} processes, {master}")
            systems: Systems = {
                "distributor": partial(ours, count),
                "torchrun": partial(torchrun, count, self.script),
            }
            if count <= PYSPARKS_MOST:
                systems["PySpark"] = partial(pysparks, count)
            with self._beside(count, master) as beside:
                found = medians({**systems, **beside}, self.rounds)
            self._keep(found, count, "on executors")
            for peer, target in zip(("PySpark", "torchrun"), targets.get(count, ())):
                judge(found, peer, target)
            spark.stop()

    def cluster(self) -> None:
        """Measure later runs of a session, on two nodes."""
        spark = session("local-cluster[2,1,1024]")
        print("warm, 2 processes, local-cluster[2,1,1024]")
        systems: Systems = {"distributor": lambda: ours(2), "PySpark": lambda: pysparks(2)}
        judge(medians(systems, self.rounds), "PySpark", 0.12)
        spark.stop()

    def cold(self) -> None:
        """Measure the first run of a session, in a new driver each time."""
        for count, target in ((2, 0.5), (16, 0.15)):
            print(f"cold, {count} processes, executors")
            systems: Systems = {name: lambda name=name: None for name in ("distributor", "PySpark")}
            seconds: dict[str, list[float]] = {name: [] for name in systems}
            for _ in range(self.rounds):
                for name in systems:
                    command = [sys.executable, __file__, "--first", name, str(count)]
                    done = subprocess.run(
                        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                    )
                    seconds[name].append(float(done.stdout.split()[-1]))
            for name, values in seconds.items():
                print(
                    f"    {name:<14} {statistics.median(values):8.2f} s  ({min(values):.2f}-{max(values):.2f})",
                    flush=True,
                )
            judge({name: statistics.median(values) for name, values in seconds.items()}, "PySpark", target)

    def local(self) -> None:
        """Measure later runs of a session, on this machine without Spark."""
        targets = {2: 0.15, 16: 0.06}
        for count in self.processes:
            print(f"warm, {count} processes, local mode")
            systems: Systems = {"distributor": partial(ours, count, local=True)}
            if count in targets:
                systems["torchrun"] = partial(torchrun, count, self.script)
            with self._beside(count) as beside:
                found = medians({**systems, **beside}, self.rounds)
            self._keep(found, count, "local")
            if count in targets:
                judge(found, "torchrun", targets[count])

    def many(self) -> None:
        """Measure the memory of 64 processes on one machine."""
        from distributor import TorchDistributor

        shares = TorchDistributor(64, True, False, logs="none").submit(memory).results()
        print(f"64 processes, local mode\n    {statistics.mean(shares) / (1 << 20):.1f} MiB of memory per rank (Pss)")

    def steps(self) -> None:
        """Measure training steps per second: run ``benchmarks/steps.py`` with its own number of rounds."""
        command = [sys.executable, str(Path(__file__).with_name("steps.py"))]
        subprocess.run([*command, *(["--before", self.before] if self.before else [])], check=True)

    def value(self) -> None:
        """Measure large return values, including one that is too large for Spark's settings."""
        value, largest = partial(large_value, VALUE_BYTES), partial(large_value, LARGEST_BYTES)
        for master in ("local[4]", "local-cluster[2,2,1024]"):
            spark = session(master)
            ours(4)  # on each executor, so that all have a warm process
            print(f"a return value of {VALUE_BYTES >> 20} MiB, and here one of {LARGEST_BYTES >> 20} MiB, {master}")
            systems: Systems = {
                "distributor": partial(ours, 1, value),
                "PySpark": partial(pysparks, 1, value),
                "the larger one": partial(ours, 1, largest),
            }
            found = medians(systems, self.rounds)
            judge(found, "PySpark", 0.1)
            judge(found, "distributor", 4.5, "the larger one")
            spark.stop()

    def breakdown(self) -> None:
        """Measure where the time of a later run goes."""
        from distributor import TorchDistributor

        for count in self.processes:
            spark = session(f"local[{max(4, count)}]")
            distributor = TorchDistributor(count, False, False, logs="none")
            distributor.run(train)
            runs = []
            for _ in range(max(3, self.rounds)):
                run = distributor.submit(train)
                groups = run.results()
                timings = run.timings
                group = min(max(groups), timings["function"])
                inside = {"process group": group, "user function": timings.pop("function") - group}
                runs.append({**timings, **inside})
            print(f"one warm run, {count} processes, local[{max(4, count)}]: seconds by phase, medians")
            names = {
                "schedule": "Spark scheduling",
                "worker": "worker start",
                "exchange": "facts exchanged",
                "agent": "agent forked",
                "import": "launcher ready",
                "fork": "ranks forked",
                "call": "functions called",
                "process group": "process group",
                "user function": "user function",
                "exit": "ranks ended",
                "collect": "outcome",
                "total": "total",
            }
            for phase, words in names.items():
                print(f"    {words:<18} {statistics.median(run[phase] for run in runs):.3f}")
            spark.stop()

    def imports(self) -> None:
        """Measure the time that ``import distributor`` takes."""
        print("import of the package")
        codes = {"python": "pass", "distributor": "import distributor"}
        runs: Systems = {name: partial(subprocess.run, [sys.executable, "-c", code]) for name, code in codes.items()}
        medians(runs, 10)

    def plot(self) -> None:
        """Draw the seconds of all systems against the number of processes."""
        if not self.points:
            self.local()
            self.executors()
        if self.plot_path is not None:
            draw(self.points, self.plot_path)
            print(f"plot: {self.plot_path}")

    def table(self) -> None:
        """Print the picture's figures as the README's table."""
        counts = sorted({int(count) for name in STYLES for count in self.points.get(name, {})})
        print(row("processes", map(str, counts)))
        print("|---" * (len(counts) + 1) + "|")
        for name, (label, _) in reversed(STYLES.items()):
            found = self.points.get(name, {})
            print(row(label, (f"{found[str(count)]:.3g}" if str(count) in found else "-" for count in counts)))


def row(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


CASES = ("executors", "cluster", "cold", "local", "many", "steps", "value", "breakdown", "imports", "plot", "table")


#: The systems' names in the picture and the table, and their markers in the picture.
STYLES = {
    "PySpark": ("PySpark's distributor, on executors", "s"),
    "torchrun": ("`torchrun --standalone`", "^"),
    "distributor, on executors": ("here, on executors", "o"),
    "distributor, local": ("here, `local_mode=True`", "D"),
}


def draw(points: Points, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, (label, marker) in STYLES.items():
        counts = sorted(map(int, points.get(name, {})))
        seconds = [points[name][str(count)] for count in counts]
        axes.plot(counts, seconds, marker=marker, label=label.replace("`", "").replace("here", "distributor"))
        for at in zip(counts, seconds):
            axes.annotate(f"{at[1]:.2g}", at, textcoords="offset points", xytext=(0, 6), ha="center")
    axes.set(xscale="log", yscale="log", xlabel="processes", ylabel="seconds from call to result")
    ticks = sorted({int(count) for found in points.values() for count in found})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title(f"One all-reduce, second run of a session, {machine()}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=2)
    axes.margins(y=0.1)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def machine() -> str:
    return f"{os.cpu_count()} CPUs"


def first(name: str, processes: int) -> None:
    """Print the seconds of the first run of a session."""
    session(f"local[{max(4, processes)}]")
    start = time.perf_counter()
    (ours if name == "distributor" else pysparks)(processes)
    print(time.perf_counter() - start, flush=True)


def main() -> None:
    import pyspark
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help=f"some of: {', '.join(CASES)}; default: all")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", help="file for the picture")
    parser.add_argument("--points", help="file in which the picture's figures are kept; figures of earlier calls stay")
    parser.add_argument("--before", help="another checkout of this package to compare with")
    parser.add_argument("--first", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first is not None:
        first(options.first[0], int(options.first[1]))
        return
    print(
        f"{machine()}, Python {platform.python_version()}, torch {torch.__version__}, PySpark {pyspark.__version__}; "
    )
    print(f"medians of {options.rounds} rounds in turn (min-max); warm means second runs")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        bench = Bench(options, str(script))
        for case in options.cases or CASES:
            getattr(bench, case)()


if __name__ == "__main__":
    main()
