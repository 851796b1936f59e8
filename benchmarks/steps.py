"""Compare training steps per second on CPUs: this package, torchrun, and torch.backends.xeon.run_cpu, in turn.

    python benchmarks/steps.py                                   # all loops, locally and on executors: 40 minutes
    python benchmarks/steps.py gradients --where local --rounds 5
    python benchmarks/steps.py --before ../old                   # another checkout of this package takes its turn, too

Each of two ranks has half of the CPUs. The medians of the ratios within each round are printed, since the load on the
machine changes from round to round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from driver import Checkout

#: The script of a rank. Its arguments: the loop, the number of steps, and the file for rank 0's measurements. run_cpu
#: gives its ranks neither rank nor address, so they find each other through files beside that file.
SCRIPT = """
import json, os, resource, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

loop, steps, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    try:
        os.close(os.open(out.with_suffix(".first"), os.O_CREAT | os.O_EXCL))
        rank = 0
    except FileExistsError:
        rank = 1
    dist.init_process_group("gloo", init_method=f"file://{out.with_suffix('.store')}", rank=rank, world_size=2)
torch.manual_seed(0)
if loop == "compute":
    model, x = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)), torch.randn(256, 512)
elif loop == "gradients":  # 6 x 16 MiB
    model, x = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))), torch.randn(4, 2048)
else:  # one gradient of 128 MiB, and as much for its reduction
    model, x = nn.Sequential(nn.Linear(512, 65536), nn.ReLU(), nn.Linear(65536, 8)), torch.randn(4, 512)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

train(max(3, steps // 10))
dist.barrier()
before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
train(steps)
seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
if dist.get_rank() == 0:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    out.write_text(json.dumps({
        "threads": torch.get_num_threads(),
        "steps/s": steps / seconds,
        "page faults": (after.ru_minflt - before.ru_minflt) / steps,
        "switches": switches / steps,
        "system": (after.ru_stime - before.ru_stime) / seconds,
        "MiB": int(status["VmRSS"].split()[0]) / 1024,
    }))
dist.barrier()
dist.destroy_process_group()
"""

#: Loops, and the number of steps of each.
LOOPS = {"compute": 200, "gradients": 20, "one-gradient": 12}

#: The target for each loop: the minimum ratio to torchrun's steps per second.
TARGETS = {"compute": 0.99, "gradients": 1.15, "one-gradient": 0.99}

#: Other measurements: page faults and switches per step, the kernel's share of the time, and memory.
MEASURES = {"page faults": ".0f", "switches": ".0f", "system": ".2f", "MiB": ".0f"}

_PROCESSES = 2

#: How often a program is started if it fails. At exit, after all measurements, one of torch's threads aborts about one
#: in a hundred ranks ("terminate called without an active exception").
_TRIES = 3

System = Callable[[list[str]], object]


class Steps:
    """The benchmark of one loop in one place.

    Args:
        loop: name of the loop.
        where: ``"local"`` or ``"executors"``.
        before: another checkout that takes part, if any.
    """

    def __init__(self, loop: str, where: str, before: str | None = None) -> None:
        self.loop, self.where = loop, where
        self._folder = tempfile.mkdtemp()
        self._script = Path(self._folder, "loop.py")
        self._script.write_text(SCRIPT)
        self._threads = max(1, len(os.sched_getaffinity(0)) // _PROCESSES)
        self._env = {"OMP_NUM_THREADS": str(self._threads)}
        checkouts = {"distributor": str(Path(__file__).parent.parent), **({"before": before} if before else {})}
        master = f"local[{_PROCESSES}]" if where == "executors" else None
        self._checkouts = {name: Checkout(folder, master) for name, folder in checkouts.items()}
        self._systems: dict[str, System] = {
            **{name: self._ours(checkout) for name, checkout in self._checkouts.items()},
            "torchrun": self._torchruns,
            "run_cpu": self._run_cpus,
        }

    def close(self) -> None:
        for checkout in self._checkouts.values():
            checkout.close()
        shutil.rmtree(self._folder)

    def round(self, steps: int) -> dict[str, dict[str, float]]:
        """Let each system take its turn, and return its measurements."""
        return {name: self._measured(system, steps) for name, system in self._systems.items()}

    def _measured(self, system: System, steps: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            out = Path(folder, "measured")
            system([self.loop, str(steps), str(out)])
            measured: dict[str, float] = json.loads(out.read_text())
        assert measured["threads"] == self._threads
        return measured

    def _ours(self, checkout: Checkout) -> System:
        return lambda args: checkout.run(_PROCESSES, str(self._script), args, self._env)

    def _torchruns(self, args: list[str]) -> None:
        self._start("torch.distributed.run", "--standalone", f"--nproc-per-node={_PROCESSES}", args=args)

    def _run_cpus(self, args: list[str]) -> None:
        cores = f"--ncores-per-instance={self._threads}"
        self._start("torch.backends.xeon.run_cpu", f"--ninstances={_PROCESSES}", cores, args=args)

    def _start(self, module: str, *options: str, args: list[str]) -> None:
        command = [sys.executable, "-m", module, *options, str(self._script), *args]
        environ = {name: value for name, value in os.environ.items() if name != "RANK"} | self._env
        for _ in range(_TRIES):
            ended = subprocess.run(command, capture_output=True, env=environ, text=True)
            if ended.returncode == 0:
                return
        sys.exit(f"{module} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")


def report(loop: str, rounds: list[dict[str, dict[str, float]]]) -> str:
    """Return a table of medians, with the median of each system's ratio to torchrun within a round."""
    lines = [f"    {'':<12}{'steps/s':>8}{'':<16}{'x torchrun':>11}" + "".join(f"{name:>12}" for name in MEASURES)]
    for name in rounds[0]:
        rates = [each[name]["steps/s"] for each in rounds]
        ratio = statistics.median(each[name]["steps/s"] / each["torchrun"]["steps/s"] for each in rounds)
        spread = f" ({min(rates):.2f}-{max(rates):.2f})"
        rest = "".join(
            f"{statistics.median(each[name][measure] for each in rounds):>12{form}}"
            for measure, form in MEASURES.items()
        )
        lines.append(f"    {name:<12}{statistics.median(rates):>8.2f}{spread:<16}{ratio:>11.3f}{rest}")
    ours = statistics.median(each["distributor"]["steps/s"] / each["torchrun"]["steps/s"] for each in rounds)
    target = TARGETS[loop]
    lines.append(f"    {ours:.3f} x torchrun; target at least {target}: {'met' if ours >= target else 'NOT MET'}")
    return "\n".join(lines)


def measure(loop: str, where: str, rounds: int, before: str | None = None, steps: int | None = None) -> None:
    """Measure one loop in one place, and print the table."""
    bench = Steps(loop, where, before)
    try:
        found = [bench.round(steps or LOOPS[loop]) for _ in range(rounds)]
    finally:
        bench.close()
    print(f"{loop}, {where}, {rounds} rounds in turn: medians; page faults and switches per step, on rank 0")
    print(report(loop, found), flush=True)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", choices=[*LOOPS, []], help=f"some of: {', '.join(LOOPS)}; default: all")
    parser.add_argument("--where", nargs="+", choices=("local", "executors"), default=["local", "executors"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, help="number of steps in each run")
    parser.add_argument("--before", help="another checkout of this package to compare with")
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}, torch {torch.__version__}")
    for where in options.where:
        for loop in options.loops or LOOPS:
            measure(loop, where, options.rounds, options.before, options.steps)


if __name__ == "__main__":
    main()
