"""Measure a search beside its peers: trials of two ranks, trials of one process, and trials that are pruned.

    python benchmarks/sweep.py ranks --ray .venvs/launchers/bin/python     # beside Ray Tune with Ray Train
    python benchmarks/sweep.py one --mlflow PYTHON                         # beside MLflow's study on Spark
    python benchmarks/sweep.py pruning                                     # beside Optuna's optimize(n_jobs=4)
    python benchmarks/sweep.py --trials 16 --sleep 2:3 --length 10         # all, but short

Peers run in a Python of their own, which has Ray, or MLflow with Optuna and PySpark. Trials sleep for the seconds of
one list, so that a trial costs little. ``gap`` is the time from a trial's return, on its last rank, to the first line
of the next trial in its slots, on its last rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

SLOTS = 8

#: At once, in the case of pruning.
WORKERS = 4

#: Reports of a trial that may be pruned; its result is known with the first.
REPORTS = 10


def seconds(number: int, low: float, high: float) -> float:
    """Return how long a trial sleeps: the same in all systems."""
    return random.Random(number).uniform(low, high)


def rest(folder: str, number: int, rank: int, low: float, high: float, begun: float | None = None) -> None:
    """Sleep as the trial must, and note when it began and ended."""
    begun = begun or time.time()
    time.sleep(seconds(number, low, high))
    Path(folder, f"{number}-{rank}").write_text(json.dumps([begun, time.time()]))


def figures(folder: str, at_once: int, began: float) -> dict[str, float]:
    """Return wall time, and the median time between a trial's end and the next trial in its slots."""
    trials: dict[str, list[list[float]]] = {}
    for path in Path(folder).iterdir():
        number, _, rank = path.name.partition("-")
        trials.setdefault(number if int(rank) < SLOTS else rank, []).append(json.loads(path.read_text()))
    starts = sorted(max(begun for begun, _ in ranks) for ranks in trials.values())
    ends = sorted(max(ended for _, ended in ranks) for ranks in trials.values())
    gaps = [start - end for start, end in zip(starts[at_once:], ends, strict=False)]
    return {"trials": len(trials), "wall": ends[-1] - began, "first": starts[0] - began, "gap": statistics.median(gaps)}


def session(slots: int) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    builder = SparkSession.builder.master(f"local[{slots}]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


def in_order() -> Any:
    """Return a sampler that numbers trials, so that systems try the same in the same order."""
    import optuna

    class InOrder(optuna.samplers.RandomSampler):
        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            return trial.number

    return InOrder()


def ours(ranks: int, trials: int, low: float, high: float) -> dict[str, float]:
    from distributor import Distributor, int_range, sweep

    def train(number: int) -> None:
        import torch.distributed as dist

        from distributor import runtime

        begun = time.time()
        if ranks > 1:  # Ray Train does so before its first line
            dist.init_process_group("gloo")
        rest(folder, number, runtime.rank(), low, high, begun)
        runtime.report(loss=number)

    with tempfile.TemporaryDirectory() as folder:
        Distributor(SLOTS, False, False, progress=False).run(int)  # Spark's workers and the warm process are up
        began = time.time()
        study = sweep(
            Distributor(ranks, False, False, progress=False, logs="none"),
            train,
            {"number": int_range(0, trials - 1)},
            metric=("loss", "min"),
            trials=trials,
            sampler=in_order(),
        )
        assert {trial.outcome for trial in study.table} == {"complete"}, study.table
        return figures(folder, SLOTS // ranks, began)


def rays(ranks: int, trials: int, low: float, high: float) -> dict[str, float]:
    import ray
    from ray import train, tune
    from ray.train.torch import TorchTrainer

    def loop(config: dict[str, Any]) -> None:
        rest(folder, config["number"], train.get_context().get_world_rank(), low, high)
        train.report({"loss": config["number"]})

    def trial(config: dict[str, Any]) -> None:
        storage = train.RunConfig(name=f"trial-{config['number']}", storage_path=f"{folder}-ray")
        scaling = train.ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 1})
        TorchTrainer(loop, train_loop_config=config, scaling_config=scaling, run_config=storage).fit()
        tune.report({"loss": config["number"]})

    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=SLOTS + 1, include_dashboard=False, log_to_driver=False)
        ray.get([ray.remote(lambda: __import__("torch") and None).remote() for _ in range(SLOTS)])  # its workers are up
        began = time.time()
        tune.Tuner(
            tune.with_resources(trial, {"CPU": 0.1}),  # beside the slots; 0 is refused
            param_space={"number": tune.grid_search(range(trials))},
            tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=SLOTS // ranks),
            run_config=tune.RunConfig(name="search", storage_path=f"{folder}-ray", verbose=0),
        ).fit()
        found = figures(folder, SLOTS // ranks, began)
        ray.shutdown()
        return found


def mlflows(ranks: int, trials: int, low: float, high: float) -> dict[str, float]:
    import mlflow
    from mlflow.optuna.storage import MlflowStorage
    from mlflow.pyspark.optuna.study import MlflowSparkStudy

    def objective(trial: Any) -> float:
        number = trial.suggest_int("number", 0, trials - 1)
        rest(folder, trial.number, time.time_ns(), low, high)  # numbers may repeat
        return float(number)

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as place:
        spark = session(SLOTS)
        warm = spark.sparkContext.parallelize(range(SLOTS), SLOTS)
        warm.map(lambda _: len(__import__("mlflow.optuna.storage").__name__)).collect()
        mlflow.set_tracking_uri(f"sqlite:///{place}/mlflow.db")
        experiment = mlflow.create_experiment("search")
        began = time.time()
        study = MlflowSparkStudy("search", storage=MlflowStorage(experiment_id=experiment))
        study.optimize(objective, n_trials=trials, n_jobs=SLOTS)
        found = figures(folder, SLOTS, began)
        spark.stop()
        return found


def by_number(number: int) -> float:
    """Return the result of a trial of the case of pruning."""
    return random.Random(f"result {number}").random()


def pruned_by_ours(trials: int, length: float, pruner: Any) -> dict[str, float]:
    from distributor import Distributor, int_range, sweep

    def train(number: int) -> None:
        from distributor import runtime

        steps = 100
        for step in range(1, steps + 1):
            time.sleep(length / steps)
            if step % (steps // REPORTS) == 0:
                runtime.report(step=step, loss=by_number(number))
            if runtime.should_stop(step):
                return

    Distributor(1, True, False, progress=False).run(int)
    began = time.time()
    study = sweep(
        Distributor(1, True, False, progress=False, logs="none"),
        train,
        {"number": int_range(0, trials - 1)},
        metric=("loss", "min"),
        trials=trials,
        at_once=WORKERS,
        sampler=in_order(),
        pruner=pruner,
    )
    assert study.best is not None and not {trial.outcome for trial in study.table} - {"complete", "pruned"}
    used = sum(trial.seconds for trial in study.table)
    count = sum(trial.outcome == "pruned" for trial in study.table)
    return {"slot-seconds": used, "wall": time.time() - began, "pruned": count, "best": study.best.params["number"]}


def pruned_by_optuna(trials: int, length: float, pruner: Any) -> dict[str, float]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    lock, used = threading.Lock(), [0.0]

    def objective(trial: Any) -> float:
        begun = time.perf_counter()
        trial.suggest_int("number", 0, trials - 1)
        try:
            for part in range(1, REPORTS + 1):
                time.sleep(length / REPORTS)
                trial.report(by_number(trial.number), part * 100 // REPORTS)
                if trial.should_prune():
                    raise optuna.TrialPruned
            return by_number(trial.number)
        finally:
            with lock:
                used[0] += time.perf_counter() - begun

    began = time.time()
    study = optuna.create_study(sampler=in_order(), pruner=pruner or optuna.pruners.NopPruner())
    study.optimize(objective, n_trials=trials, n_jobs=WORKERS)
    count = sum(trial.state.name == "PRUNED" for trial in study.get_trials())
    best = study.best_trial.number
    return {"slot-seconds": used[0], "wall": time.time() - began, "pruned": count, "best": best}


def show(name: str, found: dict[str, float]) -> None:
    print(f"    {name:<22} " + ", ".join(f"{key} {value:.6g}" for key, value in found.items()), flush=True)


def judge(what: str, value: float, target: float) -> None:
    word = "met" if value <= target else "NOT MET"
    print(f"    {what} {value:.2f}; target at most {target:g}: {word}", flush=True)


def elsewhere(python: str, case: str, asked: argparse.Namespace) -> dict[str, float]:
    """Run a peer's case in its own Python."""
    command = [python, __file__, case, "--trials", str(asked.trials), "--sleep", ":".join(map(str, asked.sleep))]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{case} failed:\n{ended.stdout}{ended.stderr}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def side_by_side(ranks: int, peer: str, python: str | None, asked: argparse.Namespace) -> None:
    low, high = asked.sleep
    print(f"{asked.trials} trials of {ranks} ranks that sleep {low:g} to {high:g} s, {SLOTS} slots: seconds")
    spark = session(SLOTS)
    found = ours(ranks, asked.trials, low, high)
    show("distributor", found)
    spark.stop()
    if python is not None:
        theirs = elsewhere(python, peer, asked)
        show(peer, theirs)
        judge(f"wall time, x {peer}", found["wall"] / theirs["wall"], 1)
    if ranks > 1:
        judge("median gap", found["gap"], 0.6)


def pruning(asked: argparse.Namespace) -> None:
    import optuna

    print(f"{asked.trials} trials of {asked.length:g} s, {WORKERS} at a time, result known at a tenth")
    pruner = optuna.pruners.PercentilePruner(25)
    systems: dict[str, Callable[[], dict[str, float]]] = {
        "distributor": lambda: pruned_by_ours(asked.trials, asked.length, pruner),
        "optuna": lambda: pruned_by_optuna(asked.trials, asked.length, pruner),
        "all to the end": lambda: pruned_by_ours(asked.trials, asked.length, None),
    }
    found = {}
    for name, system in systems.items():
        found[name] = system()
        show(name, found[name])
    used = {name: each["slot-seconds"] for name, each in found.items()}
    judge("slot-seconds, x optuna", used["distributor"] / used["optuna"], 1.15)
    judge("slot-seconds, x all to the end", used["distributor"] / used["all to the end"], 0.6)
    bests = {each["best"] for each in found.values()}
    print(f"    the same best: {'met' if len(bests) == 1 else 'NOT MET'}")


def span(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="ranks, one, pruning; default all")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--sleep", type=span, default=(10.0, 14.0), metavar="LOW:HIGH", help="seconds of a trial")
    parser.add_argument("--length", type=float, default=20.0, help="seconds of a trial that may be pruned")
    parser.add_argument("--ray", metavar="PYTHON", help="a Python with Ray, PyTorch and no need of this package")
    parser.add_argument("--mlflow", metavar="PYTHON", help="a Python with MLflow, Optuna and PySpark")
    asked = parser.parse_args()
    peers = {"ray": (rays, 2), "mlflow": (mlflows, 1)}
    for case in asked.cases or ["ranks", "one", "pruning"]:
        if case in peers:
            system, ranks = peers[case]
            print(json.dumps(system(ranks, asked.trials, *asked.sleep)))
        elif case == "pruning":
            pruning(asked)
        elif case in ("ranks", "one"):
            ranks, peer = (2, "ray") if case == "ranks" else (1, "mlflow")
            side_by_side(ranks, peer, getattr(asked, peer), asked)
        else:
            parser.error(f"no case {case!r}")


if __name__ == "__main__":
    main()
