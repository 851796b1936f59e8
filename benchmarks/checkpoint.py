"""Compare the speed of saving a model with torch.save, and measure how much saving slows training down.

    python benchmarks/checkpoint.py [--size 1024] [--rounds 5] [--folder /data] [--memory] [--replicate]
    python benchmarks/checkpoint.py --master "local-cluster[2,1,1024]" [--memory] [--replicate]

Each round saves the same tensors with ``torch.save`` and fsync, and with ``runtime.save_checkpoint``, in turn. Then it
measures the speed of training twice: while a save is written in the background, and without a save.

With ``--master``, two ranks on two nodes have the same tensors, as with DistributedDataParallel. The figures are those
of rank 0. To learn what a copy on another node costs, compare ``--memory`` with ``--replicate``.

The *stall* is the time for which ``save_checkpoint`` blocks training. It is also given as a multiple of the time that a
copy of the state in memory takes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributor import Checkpoints, Distributor

#: Number of tensors.
TENSORS = 64

#: Number of checkpoints that are kept, in either way. Rounds are measured once each save replaces an earlier one.
#: Before that, the kernel must find memory for the files.
KEPT = 3


def timed(call: Callable[[], Any]) -> float:
    """Return the number of seconds that a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure(size: int, rounds: int, folder: str) -> dict[str, list[float]]:
    """Measure in a rank. ``size`` is in MiB."""
    import torch
    import torch.distributed as dist

    from distributor import runtime
    from distributor.checkpoint import saving

    if runtime.world_size() > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    values = (size << 20) // 4 // TENSORS
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(values)) for _ in range(TENSORS)])
    spare = [torch.empty(values) for _ in range(TENSORS)]
    plain: list[Path] = []

    def copy() -> None:
        for target, source in zip(spare, model, strict=True):
            target.copy_(source.detach())

    def save_plainly() -> None:
        plain.append(Path(folder, f"plain-{runtime.rank()}-{len(plain)}.pt"))
        with open(plain[-1], "wb") as file:
            torch.save({"model": model.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        for old in plain[:-KEPT]:
            old.unlink(missing_ok=True)

    small = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    batch = torch.randn(64, 512)

    def train(until: Callable[[float], bool]) -> tuple[float, float]:
        """Return the number of steps per second, and of seconds. ``until`` gets the latter after each step."""
        begun, steps, passed = time.perf_counter(), 0, 0.0
        while not until(passed):
            small(batch).sum().backward()
            steps += 1
            passed = time.perf_counter() - begun
        return steps / passed, passed

    names = ("copy", "torch.save", "ours", "first", "stall", "steps", "dip", "beside")
    found: dict[str, list[float]] = {name: [] for name in names}
    step = 0

    def save(wait: bool) -> None:
        nonlocal step
        step += 1
        runtime.save_checkpoint({"model": model}, step, wait=wait)

    copy()
    first = timed(lambda: save(True))
    pairs = {"torch.save": save_plainly, "ours": lambda: save(True)}
    for number in range(-KEPT, rounds):
        if number == 0:
            for values_of in found.values():
                values_of.clear()
        for name in pairs if number % 2 == 0 else reversed(pairs):  # the disk may be slower after the first of them
            found[name].append(timed(pairs[name]))
        found["copy"].append(timed(copy))
        found["stall"].append(timed(lambda: save(False)))
        thread = saving.current("")._saving
        assert thread is not None
        dip, beside = train(lambda _: not thread.is_alive())  # noqa: B023  # it is called here alone
        found["dip"].append(dip)
        found["beside"].append(beside)
        found["steps"].append(train(lambda passed: passed > beside)[0])  # noqa: B023
    found["first"].append(first)
    return found


def train_on(asked: argparse.Namespace, folder: str) -> dict[str, list[float]]:
    """Measure on this machine, or with a Spark master."""
    kept = Checkpoints(f"{folder}/ours", keep=KEPT, memory=asked.memory or asked.replicate, replicate=asked.replicate)
    options: dict[str, Any] = {"use_gpu": False, "checkpoints": kept, "progress": False}
    if not asked.master:
        return Distributor(1, local_mode=True, **options).run(measure, asked.size, asked.rounds, folder)
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master(asked.master).config("spark.ui.enabled", "false").getOrCreate()
    try:
        distributor = Distributor(2, max_processes_per_node=1, **options)
        return distributor.run(measure, asked.size, asked.rounds, folder)
    finally:
        session.stop()


def main() -> None:
    """Measure, and print medians and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1024, help="MiB (1024)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to measure (the folder for temporary files)")
    parser.add_argument("--memory", action="store_true", help="keep states in shared memory as well")
    parser.add_argument("--replicate", action="store_true", help="send these states to another node as well")
    parser.add_argument("--master", default="", help="Spark master of two nodes; one rank on this machine by default")
    asked = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="checkpoints-", dir=asked.folder)
    try:
        found = train_on(asked, folder)
    finally:
        shutil.rmtree(folder)
    median = {name: statistics.median(values) for name, values in found.items()}

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))

    print(f"{asked.size} MiB, {asked.rounds} rounds, medians")
    print(f"torch.save with fsync   {median['torch.save']:7.2f} s")
    print(
        f"save_checkpoint         {median['ours']:7.2f} s   {ratio('torch.save', 'ours'):.2f} x the speed of torch.save"
    )
    print(f"the first of them       {median['first']:7.2f} s")
    print(f"the same beside training{median['beside']:7.2f} s")
    print(f"one copy in memory      {median['copy']:7.3f} s")
    print(f"stall of training       {median['stall']:7.3f} s   {ratio('stall', 'copy'):.2f} copies")
    print(
        f"steps/s while saving    {median['dip']:7.1f}     {ratio('dip', 'steps'):.2f} x those without "
        f"({median['steps']:.1f})"
    )


if __name__ == "__main__":
    main()
