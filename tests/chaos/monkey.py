"""Harms many runs at random: each has to end in success or a true error, nothing left.

    python tests/chaos/monkey.py --runs 100 [--seed 1]

Half of the runs train while something random is killed at a random time. In the others, ranks break something by
themselves: files, descriptors, clocks, the disk; or nodes cannot reach each other, or the driver is interrupted. Each
run's seed is printed before it starts; ``--runs 1 --seed 17`` does that one again.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import faults
import paths
import stores
import victims
import watch
from leftovers import Leftovers
from sessions import LOCAL, MASTERS, Sessions

from distributor import DistributorError, Run, RunCancelledError, TorchDistributor

#: Seconds within which any run has to end.
DEADLINE = 180.0

#: Training steps: about three seconds.
STEPS = 200

#: What is killed, or done, on all paths.
VICTIMS = ("nobody", "rank", "launcher", "agent", "warm", "any", "cancel", "connection", "driver")

#: What else there is where Spark runs, and on some paths.
IN_SPARK: Mapping[str, Sequence[str]] = {MASTERS[0]: ("worker",), MASTERS[-1]: ("worker", "executor")}
ON_PATHS: Mapping[str, Sequence[str]] = {
    "torchrun": ("loader",),
    "deepspeed": ("loader",),
    "mpich": ("companion", "beside", "mpiexec", "daemon"),
    "openmpi": ("companion", "beside", "mpiexec", "daemon"),
    "ray": ("companion", "beside", "head", "daemon"),
    "parameter-servers": tuple(map(str, paths.TASKS)),
}

#: What the error says, by what was killed. Of others, it depends on what the victim was about to do.
TRUE: Mapping[str, str] = {
    "rank": victims.RANK,
    **dict.fromkeys(paths.TASKS, victims.RANK),
    "launcher": victims.LAUNCHER,
    **dict.fromkeys(("agent", "worker", "executor"), victims.LOST),
    **dict.fromkeys(("companion", "mpiexec", "head", "daemon"), victims.COMPANION),
    "cancel": RunCancelledError.__name__,
}

#: What was done, and how the run ended.
Told = tuple[str, str]


def processes_of(run: Run, kind: str, folder: Path) -> list[psutil.Process]:
    """Processes of a run of some kind, as far as they are there now. Ranks have written their pids into a folder."""
    there = watch.processes(run.id)
    agents = [process for process in there if watch.is_agent(process)]
    launchers = [process for process in there if watch.is_launcher(process)]
    ranks = [child for launcher in launchers for child in launcher.children()]
    parents = [parent for agent in agents for parent in watch.owners_of(agent) if parent.pid != os.getpid()]
    companions = [process for process in there if watch.part(process) == "companion"]
    if kind in paths.TASKS:
        return [psutil.Process(int((folder / kind).read_text()))] if (folder / kind).exists() else []
    if kind in PROGRAMS:
        return victims.programs(run, *PROGRAMS[kind])
    return {
        "rank": ranks,
        "loader": [child for rank in ranks for child in rank.children()],
        "launcher": launchers,
        "agent": agents,
        "worker": [p for p in parents if "pyspark.daemon" in " ".join(p.cmdline())][:1],
        "executor": [p for p in parents if "CoarseGrainedExecutorBackend" in " ".join(p.cmdline())],
        "warm": watch.warm_processes(),
        "companion": companions,
        "beside": [child for companion in companions for child in companion.children(recursive=True)],
        "any": there,
    }.get(kind, [])


PROGRAMS = {"head": victims.HEAD, "mpiexec": victims.MPIEXEC, "daemon": victims.DAEMON}


def strike(run: Run, kind: str, source: random.Random, folder: Path) -> str:
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
        there = processes_of(run, kind, folder)
        if there:
            victim = source.choice(there)
            victim.kill()
            return f"killed {victim.pid}"
    return "nobody there"


def ended(run: Run, left: Leftovers) -> str:
    """How a run has ended, nothing of which is left.

    Raises:
        AssertionError: it did not end, or left something behind.
    """
    assert run.wait(DEADLINE), f"has not ended within {DEADLINE} s"
    try:
        end = f"success: {run.results(0)}"
    except DistributorError as error:
        assert "\tat " not in str(error), error
        end = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    left.gone(run.id)
    return end


def killed(source: random.Random, sessions: Sessions, folder: Path, left: Leftovers, path: str) -> Told:
    """A training of which something is killed, some time after its run has begun, or after its ranks have."""
    mode, ranks, when = (
        source.choice([LOCAL, *MASTERS]),
        source.randint(paths.least(path), 4),
        source.choice(BEGINNINGS),
    )
    delay = source.uniform(0.0, 6.0 if when == "start" else 1.0)
    kind = source.choice([*VICTIMS, *ON_PATHS.get(path, ()), *IN_SPARK.get(mode, ())])
    case = f"{path}, {mode}, {ranks} ranks, {kind} {delay:.1f} s after the {when}"
    if kind == "driver":
        sessions.stop()
        driver = victims.Driver(path, mode, ranks, folder)
        if when == "first steps":
            driver.await_ranks()
        time.sleep(delay)
        driver.kill()
        left.gone(driver.run)
        return f"{case}: killed {driver.run}", "nothing is left"
    if mode != LOCAL:
        sessions.get(mode)
    distributor = paths.distributor(path, ranks, mode == LOCAL, grace_period=1, heartbeat_timeout=10, logs="none")
    run = distributor.submit(paths.training(path), str(folder), STEPS)
    if when == "first steps":
        here = [folder / name for name in paths.names(path, ranks)]
        watch.until(lambda: all(path.exists() for path in here) or run.wait(0), DEADLINE)
    run.wait(delay)
    done = strike(run, kind, source, folder) if not run.wait(0) else "too late"
    end = ended(run, left)
    if end != f"success: {paths.values(path, ranks, STEPS)}":
        assert not end.startswith("success") and done not in IN_VAIN, f"{case}: {done} -> {end}"
        assert re.search(TRUE.get(kind, ""), end), f"{case}: {done} -> {end}"
    return f"{case}: {done}", end


#: From when on it is counted until something is killed.
BEGINNINGS = ("start", "first steps", "first steps")

IN_VAIN = ("nobody there", "too late")


def distributor_for(source: random.Random, sessions: Sessions, ranks: int) -> tuple[str, TorchDistributor]:
    mode = source.choice([LOCAL, *MASTERS])
    if mode != LOCAL:
        sessions.get(mode)
    method = source.choice(["fork", "fork", "spawn"])
    options: Any = {"grace_period": 1, "logs": "none", "start_method": method}
    return f"{mode}, {ranks} ranks, {method}", TorchDistributor(ranks, mode == LOCAL, False, **options)


def broken(source: random.Random, sessions: Sessions, folder: Path, left: Leftovers) -> Told:
    """Ranks that break what they stand on, and then return or raise."""
    ranks, fault, then = source.randint(2, 4), source.choice(list(faults.BREAKS)), source.choice(["return", "raise"])
    where, distributor = distributor_for(source, sessions, ranks)
    end = ended(distributor.submit(faults.break_then, fault, then), left)
    if then == "raise":
        assert ValueError.__name__ in end and end.startswith("TrainingError: rank 1 "), end
    else:
        assert end == f"success: {[str(rank) for rank in range(ranks)]}", end
    return f"{where}, {fault}, {then}", end


def long_message(source: random.Random, sessions: Sessions, folder: Path, left: Leftovers) -> Told:
    """Ranks that all raise with long messages."""
    ranks, length = source.randint(1, 4), source.randint(1, 40 << 20)
    where, distributor = distributor_for(source, sessions, ranks)
    end = ended(distributor.submit(faults.raise_at_length, length), left)
    assert end.startswith("TrainingError: rank") and "failed: ValueError: x" in end, end
    return f"{where}, {length} characters", end


def full_disk(source: random.Random, sessions: Sessions, folder: Path, left: Leftovers) -> Told:
    """A rank that fills the disk of its node's folder."""
    then = source.choice(["return", "raise", "print", "exit"])
    disk, before = folder / "disk", tempfile.gettempdir()
    disk.mkdir()
    with stores.small_disk(disk, "8m"):
        tempfile.tempdir = str(disk)
        try:
            end = ended(TorchDistributor(1, True, False, logs="none").submit(faults.fill_then, then, 10), left)
        finally:
            tempfile.tempdir = before
    true = {"return": "success: ", "raise": "ValueError: ", "print": "[Errno 28] No space", "exit": "with code 3"}
    assert true[then] in end and (then == "return" or " is full" in end), end
    return f"full disk, {then}", end


def apart(source: random.Random, sessions: Sessions, folder: Path, left: Leftovers) -> Told:
    """A rank that fails while its launcher waits for the store on another node."""
    sessions.get(MASTERS[-1])
    go = folder / "go"
    run = TorchDistributor(4, False, False, logs="none", grace_period=1).submit(faults.fail_after, str(go), 3)
    watch.until(lambda: all(Path(f"{go}.{rank}").exists() for rank in range(4)))
    assert run.placement is not None
    port = run.placement.master.port
    launchers = [process for process in watch.processes(run.id) if watch.is_launcher(process)]
    (store,) = [launcher for launcher in launchers if port in (line.laddr.port for line in launcher.net_connections())]
    store.suspend()
    time.sleep(source.uniform(0.0, 2.0))
    go.touch()
    try:
        watch.until(lambda: run.status.value != "running", 10.0)
    finally:
        store.resume()
    end = ended(run, left)
    for path in folder.iterdir():
        path.unlink()
    assert "TrainingError: rank 3 " in end and "while the nodes were apart" in end, end
    return "nodes that do not reach each other", end


def interrupted(source: random.Random, sessions: Sessions, folder: Path, left: Leftovers) -> Told:
    """Ctrl-C at any moment of a run, the first instants among them."""
    delay = source.choice([source.uniform(0.0, 0.01), source.uniform(0.0, 1.0)])
    where, distributor = distributor_for(source, sessions, 2)
    before = {id(run) for run in runs().active}
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    end = "success"
    try:
        timer.start()
        distributor.run(faults.nap, 0.5)
        timer.cancel()
        timer.join()
    except KeyboardInterrupt:
        end = "KeyboardInterrupt"
    for run in runs().active:
        if id(run) not in before:
            assert run.wait(DEADLINE)
            left.gone(run.id)
    return f"{where}, Ctrl-C after {delay:.3f} s", end


def returning(source: random.Random, sessions: Sessions, folder: Path, left: Leftovers) -> Told:
    """A run whose training has ended: who passes on its values is killed, or Spark's job is cancelled."""
    spark = sessions.get(source.choice(MASTERS))
    ranks, size = source.randint(1, 4), source.choice([1000, source.randint(1 << 20, 64 << 20)])
    kind, delay = source.choice(["worker", "executor", "job"]), source.choice([0.0, source.uniform(0.0, 0.3)])
    run = TorchDistributor(ranks, False, False, logs="none").submit(faults.give, size)
    watch.until(lambda: run.status.value == "running" or run.wait(0))
    watch.until(lambda: run.snapshot().ranks_up == 0)
    time.sleep(delay)
    if kind == "job":
        spark.sparkContext.cancelAllJobs()
        done = "cancelled"
    else:
        done = strike(run, kind, source, folder)
    assert run.wait(DEADLINE), f"has not ended within {DEADLINE} s"
    end = "success"
    try:
        assert run.results(0) == [bytes([rank]) * size for rank in range(ranks)]
    except RunCancelledError as error:
        assert kind == "job"
        end = type(error).__name__
    left.gone(run.id)
    return f"{ranks} values of {size} bytes, {kind} after {delay:.2f} s: {done}", end


def runs() -> list[Run]:
    return [run for run in gc.get_objects() if type(run) is Run]


def deaf(source: random.Random, sessions: Sessions, folder: Path, left: Leftovers) -> Told:
    """A driver that ignores SIGCHLD, as its shell may have told it to."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        method = source.choice(["fork", "spawn"])
        end = ended(TorchDistributor(2, True, False, logs="none", start_method=method).submit(faults.nap, 0.1), left)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert end.startswith("success"), end
    return f"SIGCHLD ignored, {method}", end


Play = Callable[[random.Random, Sessions, Path, Leftovers], Told]

PLAYS: tuple[Play, ...] = (broken, long_message, full_disk, apart, interrupted, deaf, returning)


def play(seed: int, sessions: Sessions, folder: str) -> Told:
    """One run; what was done to it, and how it ended. Where other launch paths are, something of theirs is killed.

    Seeds that follow each other try one path after the other.

    Raises:
        AssertionError: it did not end, ended in an untrue way, or left something behind.
    """
    source, left, tried = random.Random(seed), Leftovers(), paths.installed()
    if not {*tried} <= {*paths.PATHS} or source.random() < 0.5:
        return killed(source, sessions, Path(folder), left, tried[seed % len(tried)])
    return source.choice(PLAYS)(source, sessions, Path(folder), left)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in its background ignore it
    with tempfile.TemporaryDirectory(prefix="dm-", ignore_cleanup_errors=True) as temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary  # others leave their files in other folders
        return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    """All runs; returns how many did not end as they should."""
    sessions, wrong = Sessions(), []
    for seed in range(options.seed, options.seed + options.runs):
        print(f"seed {seed}: ", end="", flush=True)
        start = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                case, end = play(seed, sessions, folder)
            print(f"{case} -> {end} ({time.monotonic() - start:.1f} s)", flush=True)
        except (Exception, KeyboardInterrupt) as error:
            wrong.append(seed)
            print(f"WRONG: {type(error).__name__}: {error} ({time.monotonic() - start:.1f} s)", flush=True)
    sessions.stop()
    print(f"{options.runs - len(wrong)} of {options.runs} runs ended as they should", *map(str, wrong))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
