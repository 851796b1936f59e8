"""Measure how long a training stands still after a kill: this package, torchrun and Ray Train, in turn.

    python benchmarks/recovery.py [--ranks 2] [--size 100] [--rounds 5] [--master "local-cluster[2,1,1024]"] [--ray]

Each training saves its state once, kills one of its own processes, and goes on from that state. A round measures the
seconds from the kill until all ranks have made a new step. With ``--ray``, Ray Train takes part; it must be installed.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

#: The processes to kill, and the maximum number of seconds that may then pass until all ranks have made a new step;
#: ``None`` if there is no target.
TARGETS = {"rank": 1.0, "agent": 3.0, "worker": 3.0, "executor": None, "driver": 15.0}

PRELOAD = ["psutil"]  # which ranks use to find the victim

_AFTER = 3.0  # seconds of training before a kill


def train(folder: str, size: int, victim: str) -> None:
    """Save a state of ``size`` MiB, kill the victim, and in the next attempt load the state and make a step."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():  # Ray Train has done so
        dist.init_process_group("gloo")
    rank, saved, killed = dist.get_rank(), Path(folder, "state.pt"), Path(folder, "killed")
    layer = torch.nn.utils.skip_init(torch.nn.Linear, 1024, size * 256, bias=False)  # its values are loaded, or stay 0
    model = torch.nn.parallel.DistributedDataParallel(layer, init_sync=False)  # all ranks load the same values
    if killed.exists():
        model.module.load_state_dict(torch.load(saved, mmap=True, weights_only=True))
    elif rank == 0:
        torch.save(model.module.state_dict(), saved)
    dist.barrier()
    model(torch.zeros(1, 1024)).sum().backward()
    dist.barrier()
    if killed.exists():
        Path(folder, f"went-on-{rank}").write_text(str(time.time()))
        return
    if rank == 1 % dist.get_world_size():
        time.sleep(_AFTER)
        pid = victim_of(victim)
        killed.with_suffix(".new").write_text(str(time.time()))
        killed.with_suffix(".new").rename(killed)
        os.kill(pid, 9)
    time.sleep(600)


def victim_of(name: str) -> int:
    """Return the pid of this rank, or of a process to which it belongs."""
    import psutil

    this = psutil.Process()
    if name == "rank":
        return this.pid
    agent = next(process for process in this.parents() if "agent" in process.cmdline()[4:5])
    owner = psutil.Process(int(agent.cmdline()[5]))
    if name == "agent":
        return agent.pid
    if name in ("worker", "driver"):
        return owner.pid
    above = [owner, *owner.parents()]
    return next(process.pid for process in above if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()))


def seconds(folder: str) -> float:
    """Return the seconds from the kill to the first new step of the last rank; infinity if training did not go on."""
    ends = [float(path.read_text()) for path in Path(folder).glob("went-on-*")]
    return max(ends) - float(Path(folder, "killed").read_text()) if ends else math.inf


def here(victim: str, local: bool, options: argparse.Namespace, folder: str) -> None:
    """Train with this package, which starts again by itself."""
    from distributor import Distributor

    made = Distributor(options.ranks, local, False, max_restarts=1, logs="none", grace_period=5, preload=PRELOAD)
    made.run(train, folder, options.size, victim)


def here_after_its_driver(options: argparse.Namespace, folder: str) -> None:
    """Train in a separate driver process, which is killed and started again."""
    command = [sys.executable, __file__, "--drive", folder, "--ranks", str(options.ranks), "--size", str(options.size)]
    for _ in range(2):
        subprocess.run(command, stderr=subprocess.DEVNULL)


def drive(options: argparse.Namespace) -> None:
    from distributor import Distributor

    kept = os.path.join(options.drive, "kept")
    made = Distributor(
        options.ranks, True, False, name="benchmark", checkpoints=kept, logs="none", grace_period=5, preload=PRELOAD
    )
    made.run(train, options.drive, options.size, "driver")


def with_torchrun(options: argparse.Namespace, folder: str) -> None:
    """Train with torchrun on this machine."""
    import psutil

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(options.ranks), __file__, "--train", folder, "--size", str(options.size)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with suppress(subprocess.TimeoutExpired):  # its new ranks sometimes connect to those that were killed
        process.wait(60)
        return
    for child in [*psutil.Process(process.pid).children(recursive=True), process]:
        child.kill()
    process.wait()


def with_ray(options: argparse.Namespace, folder: str) -> None:
    """Train with Ray Train, in a Ray that is already running."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        lambda: train(folder, options.size, "rank"),
        scaling_config=ScalingConfig(num_workers=options.ranks),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    ).fit()


def systems(options: argparse.Namespace) -> dict[str, Callable[[str], None]]:
    """Return the systems that take turns, by name."""
    found: dict[str, Callable[[str], None]] = {
        "rank, local": partial(here, "rank", True, options),
        "rank, torchrun": partial(with_torchrun, options),
        "agent, local": partial(here, "agent", True, options),
        "driver, local": partial(here_after_its_driver, options),
    }
    if options.ray:
        found["rank, Ray Train"] = partial(with_ray, options)
    if options.master:
        for victim in ("rank", "agent", "worker", "executor"):
            found[f"{victim}, executors"] = partial(here, victim, False, options)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", type=int, default=100, help="MiB of state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--master", default="local-cluster[2,1,1024]", help="Spark master; empty to leave Spark out")
    parser.add_argument("--ray", action="store_true", help="let Ray Train take part")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> Any:
    """Start what the systems share, and make a first run with each kind of warm process."""
    from distributor import Distributor

    session = None
    if options.master:
        from pyspark.sql import SparkSession

        os.environ["PYSPARK_PYTHON"] = sys.executable
        session = SparkSession.builder.master(options.master).config("spark.ui.enabled", "false").getOrCreate()
        session.sparkContext.setLogLevel("OFF")
    if options.ray:
        import ray

        ray.init(num_cpus=options.ranks, include_dashboard=False, log_to_driver=False)
    for local in (True, False) if options.master else (True,):
        Distributor(options.ranks, local, False, logs="none", preload=PRELOAD).run(os.getpid)
    return session


def main() -> None:
    options = parse()
    if options.train:
        train(options.train, options.size, "rank")
        return
    if options.drive:
        drive(options)
        return
    session = prepare(options)
    found: dict[str, list[float]] = {name: [] for name in systems(options)}
    for number in range(options.rounds):
        order = list(found) if number % 2 == 0 else list(found)[::-1]
        for name in order:
            with tempfile.TemporaryDirectory() as folder:
                systems(options)[name](folder)
                found[name].append(seconds(folder))
                print(f"round {number + 1}, {name}: {found[name][-1]:.2f} s", flush=True)
    print(f"\n{'kill of a':20}  {'went on':>8}  {'median s':>8}  {'worst s':>8}  {'target':>8}")
    for name, times in found.items():
        most = TARGETS[name.partition(",")[0]] if not name.endswith(("torchrun", "Train")) else None
        shown = "" if most is None else f"{most:.1f}"
        ended = [time for time in times if time < math.inf] or [math.nan]
        went_on = f"{sum(time < math.inf for time in times)}/{len(times)}"
        print(f"{name:20}  {went_on:>8}  {statistics.median(ended):8.2f}  {max(ended):8.2f}  {shown:>8}")
    if session is not None:
        session.stop()


if __name__ == "__main__":
    main()
