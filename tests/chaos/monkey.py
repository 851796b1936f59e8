"""Kills something random at a random time in many runs: each has to end in success or a true error, nothing left.

    python tests/chaos/monkey.py --runs 100 [--seed 1]

A run's seed is printed before it starts; ``--runs 1 --seed 17`` does that one again.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import paths
import watch
from sessions import LOCAL, MASTERS, Sessions

from distributor import DistributorError, Run

#: Seconds within which any run has to end.
DEADLINE = 90.0

#: Training steps: about three seconds.
STEPS = 200

VICTIMS = ("nobody", "rank", "loader", "launcher", "agent", "worker", "executor", "warm", "any", "cancel", "connection")


def victims(run: Run, kind: str) -> list[psutil.Process]:
    """Processes of a run of some kind, as far as they are there now."""
    found = watch.processes(run.id)
    agents = [process for process in found if watch.is_agent(process)]
    launchers = [process for process in found if watch.is_launcher(process)]
    ranks = [child for launcher in launchers for child in launcher.children()]
    parents = [parent for agent in agents for parent in watch.owners_of(agent) if parent.pid != os.getpid()]
    return {
        "rank": ranks,
        "loader": [child for each in ranks for child in each.children()],
        "launcher": launchers,
        "agent": agents,
        "worker": [p for p in parents if "pyspark.daemon" in " ".join(p.cmdline())][:1],
        "executor": [p for p in parents if "CoarseGrainedExecutorBackend" in " ".join(p.cmdline())],
        "warm": watch.warm_processes(),
        "any": found,
    }.get(kind, [])


def strike(run: Run, kind: str, source: random.Random) -> str:
    """Does the harm; says to whom."""
    if kind == "cancel":
        run.cancel()
        return "cancelled"
    server = run._supervisor.server
    if kind == "connection" and server is not None:
        peers = list(server._peers.values())
        if peers:
            server._loop.call_soon_threadsafe(source.choice(peers).writer.transport.abort)
            return "cut a connection"
    with suppress(psutil.NoSuchProcess):
        there = victims(run, kind)
        if there:
            victim = source.choice(there)
            victim.kill()
            return f"killed {victim.pid}"
    return "nobody there"


def play(seed: int, sessions: Sessions, folder: str) -> tuple[str, str]:
    """One run; what was done to it, and how it ended.

    Raises:
        AssertionError: it did not end, ended in an untrue way, or left something behind.
    """
    source = random.Random(seed)
    mode = source.choice([LOCAL, *MASTERS])
    ranks, kind, delay = source.randint(1, 4), source.choice(VICTIMS), source.uniform(0.0, 6.0)
    if mode != LOCAL:
        sessions.get(mode)
    path, shared = source.choice(paths.PATHS), set(watch.shared_memory())
    distributor = paths.distributor(path, ranks, mode == LOCAL, grace_period=1, heartbeat_timeout=10, logs="none")
    run = distributor.submit(paths.training(path), folder, STEPS)
    run.wait(delay)
    what = f"{path}, {mode}, {ranks} ranks, {kind} after {delay:.1f} s"
    done = strike(run, kind, source) if not run.wait(0) else "too late"
    assert run.wait(DEADLINE), f"has not ended within {DEADLINE} s"
    try:
        values = run.results(0)
        assert values == [STEPS] * ranks, values
        end = "success"
    except DistributorError as error:
        assert done not in ("nobody there", "too late"), error
        assert "\tat " not in str(error), error
        end = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    watch.gone(run.id, watch.ORPHAN_DEADLINE)
    watch.until(lambda: not [left for left in watch.folders() if run.id in left.name])
    watch.until(lambda: not set(watch.shared_memory()) - shared)
    return f"{what}: {done}", end


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args(argv)
    sessions, wrong = Sessions(), []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.runs):
            print(f"seed {seed}: ", end="", flush=True)
            start = time.monotonic()
            try:
                what, end = play(seed, sessions, folder)
                print(f"{what} -> {end} ({time.monotonic() - start:.1f} s)", flush=True)
            except Exception as error:
                wrong.append(seed)
                print(f"WRONG: {type(error).__name__}: {error} ({time.monotonic() - start:.1f} s)", flush=True)
    sessions.stop()
    print(f"{options.runs - len(wrong)} of {options.runs} runs ended as they should", *map(str, wrong))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
