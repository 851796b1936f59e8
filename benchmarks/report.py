"""Measure the cost of a report in a rank, in Ray Train if Ray is installed, and of a printed line for comparison.

The systems take turns; medians of the rounds are printed, in microseconds per call. Ray Train's ``report`` is called by
the workers of a ``TorchTrainer``. Run it on an idle machine:

    python benchmarks/report.py --calls 20000 --rounds 5
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

from distributor import Distributor


def ours(calls: int, pause: float) -> float:
    """Report from two ranks, and return rank 0's microseconds per call, without the pauses."""

    def train(calls: int, pause: float) -> float:
        from distributor import runtime

        spent = 0.0
        for step in range(calls):
            begun = time.perf_counter()
            runtime.report(step=step, loss=0.5, lr=1e-3)
            spent += time.perf_counter() - begun
            if pause:
                time.sleep(pause)
        return 1e6 * spent / calls

    return float(Distributor(2, local_mode=True, use_gpu=False).run(train, calls, pause))


def a_line(calls: int, pause: float) -> float:
    """Print a line for each step from two ranks, as training without reports does."""

    def train(calls: int, pause: float) -> float:
        spent = 0.0
        for step in range(calls):
            begun = time.perf_counter()
            print(f"step {step} loss {0.5} lr {1e-3}")
            spent += time.perf_counter() - begun
            if pause:
                time.sleep(pause)
        return 1e6 * spent / calls

    return float(Distributor(2, local_mode=True, use_gpu=False, logs="none").run(train, calls, pause))


def rays(calls: int, pause: float) -> float:
    """Report from two workers of Ray Train."""
    from distributor.launch import Ray

    def train(calls: int, pause: float) -> float:
        import tempfile

        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        def work(config: dict[str, float]) -> None:
            import json

            import ray.train

            spent, calls = 0.0, int(config["calls"])
            for step in range(calls):
                begun = time.perf_counter()
                ray.train.report({"step": step, "loss": 0.5, "lr": 1e-3})
                spent += time.perf_counter() - begun
                if config["pause"]:
                    time.sleep(config["pause"])
            if ray.train.get_context().get_world_rank() == 0:
                with open(config["out"], "w") as file:  # type: ignore[call-overload]
                    json.dump(1e6 * spent / calls, file)

        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/out"
            TorchTrainer(
                work,
                train_loop_config={"calls": calls, "pause": pause, "out": out},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=folder),
            ).fit()
            with open(out) as file:
                return float(file.read())

    return float(Distributor(2, local_mode=True, use_gpu=False, launch=Ray(), logs="none").run(train, calls, pause))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000, help="number of calls of each rank without pauses")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    ways: dict[str, Callable[[int, float], float]] = {"distributor": ours, "print": a_line}
    if importlib.util.find_spec("ray") is not None:
        ways["Ray Train"] = rays
    for what, calls, pause in (("at once", asked.calls, 0.0), ("1,000 a second", 1000, 1e-3)):
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(asked.rounds):
            for name, measure in ways.items():
                # Ray Train makes only one or two calls a second, so a few calls are enough.
                found[name].append(measure(min(calls, 20) if name == "Ray Train" else calls, pause))
        for name, times in found.items():
            print(f"{what:15} {name:12} {statistics.median(times):10.1f} µs per call")


if __name__ == "__main__":
    main()
