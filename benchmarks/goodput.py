"""Compute the share of time that a long training spends in training, on many nodes that fail now and then.

    python benchmarks/goodput.py [--runs 100] [--nodes 8 1000 10000] [--days 30]

First, small trainings run on this machine, with ranks that are killed at random steps. Half of these runs give the
constants of a model: the seconds of a start, a restart, a stop, a step, a save and a load. For the other half, the
model predicts the share of training, which is compared with ``run.goodput``.

The model then computes the shares for many nodes. It uses these constants, except those of a save and a load. These,
other times that this machine cannot show, and the rates of failures come from the options.

The default rates come from the training of Llama 3 on 16,384 GPUs, on nodes with eight GPUs. It had 419 unexpected
interruptions in 54 days, about three quarters of them from hardware (Llama Team, "The Llama 3 Herd of Models", 2024,
section 3.3.4, https://arxiv.org/abs/2407.21783).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from distributor.metrics.goodput import Goodput
from distributor.runtime import suggest_checkpoint_interval

#: The shape of a small training: its steps, the seconds of a step, and the steps between two saves.
STEPS, PAUSE, EVERY = 60, 0.05, 10

#: The probability that a rank is killed after a step, and the number of ranks.
RISK, RANKS = 0.02, 2

#: Seconds of a day.
DAY = 86_400.0


@dataclass(frozen=True)
class Constants:
    """The constants of the model, in seconds.

    Attributes:
        step: one step.
        save, load: the calls that save and load a checkpoint.
        start: from the call of ``run`` to the first step.
        restart: from the end of an attempt to the first step of the next one on the same nodes, without the load.
        stop: from a failure until its ranks have ended.
    """

    step: float
    save: float
    load: float
    start: float
    restart: float
    stop: float


def killed_after(seed: int, attempt: int, begun: int) -> int | None:
    """Return the step after which a rank is killed in an attempt; ``None`` if no rank is killed."""
    drawn = random.Random(f"{seed}-{attempt}")
    return next((step for step in range(begun + 1, STEPS + 1) if drawn.random() < RISK), None)


def train(seed: int) -> None:
    """Run a small training, with two ranks that make each step together."""
    import torch
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    state = {"step": 0, "weights": torch.zeros(1 << 18)}
    begun = runtime.load_checkpoint(state) or 0
    last = killed_after(seed, runtime.attempt(), begun)
    for step in range(begun + 1, STEPS + 1):
        time.sleep(PAUSE)
        dist.all_reduce(torch.zeros(1))
        state["step"] = step
        runtime.report(step=step)
        if step % EVERY == 0:
            runtime.save_checkpoint(state, step, wait=True)
        dist.barrier()  # all ranks have reported the step
        if step == last and runtime.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def observed(seed: int) -> list[Goodput]:
    """Run a small training, and return where the time of each attempt went."""
    from distributor import Distributor

    with tempfile.TemporaryDirectory() as folder:
        distributor = Distributor(RANKS, True, False, checkpoints=folder, max_restarts=50, logs="none", progress=False)
        run = distributor.submit(train, seed)
        run.result()
        return [attempt.goodput for attempt in run.attempts]


def constants(runs: Iterable[Sequence[Goodput]]) -> Constants:
    """Return the constants, as means of what runs have shown."""
    runs = list(runs)
    first, later = [run[0] for run in runs], [attempt for run in runs for attempt in run[1:]]
    if not later:
        sys.exit("no rank was killed: raise --runs")
    steps = sum(each.training + each.redoing for run in runs for each in run)
    made = sum(_steps_made(seed) for seed in range(0, 2 * len(runs), 2))
    saves = sum(_saves_made(seed) for seed in range(0, 2 * len(runs), 2))
    return Constants(
        step=steps / made,
        save=sum(each.saving for run in runs for each in run) / saves,
        load=statistics.mean(each.loading for each in later),
        start=statistics.mean(each.waiting + each.starting + each.loading for each in first),
        restart=statistics.mean(each.waiting + each.starting for each in later),
        stop=statistics.mean(each.stopping for run in runs for each in run[:-1]),
    )


def _attempts(seed: int) -> list[tuple[int, int, bool]]:
    """Return the first and the last step of each attempt of a small training, and whether it ended with a kill."""
    found, saved = [], 0
    while True:
        last = killed_after(seed, len(found), saved)
        found.append((saved + 1, last or STEPS, last is not None))
        if last is None:
            return found
        saved = max(saved, last // EVERY * EVERY)


def _steps_made(seed: int) -> int:
    return sum(last - first + 1 for first, last, _ in _attempts(seed))


def _saves_made(seed: int) -> int:
    return sum(last // EVERY - (first - 1) // EVERY for first, last, _ in _attempts(seed))


def predicted(seed: int, about: Constants) -> Goodput:
    """Return where the time of a small training goes, according to the model."""
    whole, reached = Goodput(), 0
    for number, (first, last, killed) in enumerate(_attempts(seed)):
        redone = max(0, min(last, reached) - first + 1)
        whole += Goodput(
            training=(last - first + 1 - redone) * about.step,
            starting=about.restart if number else about.start,
            loading=about.load if number else 0.0,
            saving=(last // EVERY - (first - 1) // EVERY) * about.save,
            redoing=redone * about.step,
            stopping=about.stop if killed else 0.0,
        )
        reached = max(reached, last)
    return whole


def calibrate(number: int) -> Constants:
    """Run small trainings, and print how well the model predicts them. Return its constants."""
    observed(-1)  # starts the warm process
    runs = [observed(seed) for seed in range(number)]
    about = constants(runs[::2])
    print(f"{number} runs of {STEPS} steps, {sum(len(run) - 1 for run in runs)} kills")
    print(", ".join(f"{name} {1000 * value:.0f} ms" for name, value in vars(about).items()))
    seen = [sum(run, Goodput()).share for run in runs[1::2]]
    told = [predicted(seed, about).share for seed in range(1, number, 2)]
    error = abs(statistics.mean(told) / statistics.mean(seen) - 1)
    each = statistics.mean(abs(a / b - 1) for a, b in zip(told, seen, strict=True))
    print(f"share of training: {statistics.mean(seen):.3f} seen, {statistics.mean(told):.3f} predicted")
    print(f"    error {100 * error:.1f} %; target at most 5 %: {'met' if error <= 0.05 else 'NOT MET'}")
    print(f"    error of a single run {100 * each:.1f} % on average", flush=True)
    return about


@dataclass(frozen=True)
class Site:
    """Times and rates that this machine cannot show.

    Attributes:
        replace: seconds until a lost node has been replaced.
        per_node: seconds that each node adds to a start.
        crashes, losses: failures of ranks, and of nodes, per node and day.
    """

    replace: float
    per_node: float
    crashes: float
    losses: float


def simulate(about: Constants, site: Site, nodes: int, days: float, seed: int = 0) -> Goodput:
    """Return where the time of a long training goes, with the best interval between saves."""
    drawn, rate = random.Random(seed), nodes * (site.crashes + site.losses)
    interval = suggest_checkpoint_interval(rate, about.save)
    whole, lost = Goodput(), 0.0
    again, loads, waits = about.start + nodes * site.per_node, 0.0, 0.0
    while whole.total < days * DAY:
        lives = drawn.expovariate(rate / DAY)  # seconds until the next failure on any node
        up = min(lives, again + loads)
        life, lost = _life(lives - up, lost, interval, about.save)
        whole += (
            Goodput(waiting=waits, starting=max(0.0, up - loads), loading=min(up, loads), stopping=about.stop) + life
        )
        crash = drawn.random() < site.crashes / (site.crashes + site.losses)
        again = about.restart if crash else about.start + nodes * site.per_node
        loads, waits = about.load, 0.0 if crash else site.replace
    return whole


def _life(seconds: float, lost: float, interval: float, save: float) -> tuple[Goodput, float]:
    """Return where the time between two failures goes, and how much of it is lost at the second one.

    Args:
        seconds: the time.
        lost: seconds of steps that were lost at the first failure.
        interval: seconds of steps between two saves.
        save: seconds of a save.
    """
    redoing = min(lost, seconds)
    if redoing < lost:
        return Goodput(redoing=redoing), lost
    left, since, training, saving = seconds - redoing, lost, 0.0, 0.0
    while left > 0.0:
        steps = min(left, interval - since)
        training, since, left = training + steps, since + steps, left - steps
        if left > 0.0:
            saving += min(save, left)
            since = 0.0 if left >= save else since
            left -= min(save, left)
    return Goodput(training=training, saving=saving, redoing=redoing), since


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="small trainings; half of them give the constants")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 100, 1_000, 10_000, 100_000])
    parser.add_argument("--days", type=float, default=30.0, help="length of the training")
    parser.add_argument("--save", type=float, default=5.0, help="seconds for which a save holds up a large training")
    parser.add_argument("--load", type=float, default=30.0, help="seconds of a load in a large training")
    parser.add_argument("--replace", type=float, default=120.0, help="seconds until a lost node has been replaced")
    parser.add_argument("--per-node", type=float, default=0.01, help="seconds that each node adds to a start")
    parser.add_argument("--crashes", type=float, default=0.001, help="failures of ranks per node and day")
    parser.add_argument("--losses", type=float, default=0.003, help="losses of nodes per node and day")
    asked = parser.parse_args()
    about = replace(calibrate(asked.runs), save=asked.save, load=asked.load)
    site = Site(asked.replace, asked.per_node, asked.crashes, asked.losses)
    print(f"{asked.days:g} days; {site}; save {about.save:g} s, load {about.load:g} s")
    print(f"{'nodes':>8}{'training':>10}{'redoing':>9}{'saving':>8}{'waiting':>9}{'starting':>10}{'loading':>9}")
    for nodes in asked.nodes:
        found = simulate(about, site, nodes, asked.days)
        shares = (found.training, found.redoing, found.saving, found.waiting, found.starting, found.loading)
        widths = (10, 9, 8, 9, 10, 9)
        row = "".join(f"{100 * each / found.total:>{width - 2}.1f} %" for each, width in zip(shares, widths))
        print(f"{nodes:>8}{row}")


if __name__ == "__main__":
    main()
