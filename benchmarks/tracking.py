"""Measure what the callback for MLflow costs a training: without it, with a server, and with one that is down, in turn.

    .venvs/mlflow/bin/python benchmarks/tracking.py [--rounds 15] [--steps 100]

One rank trains on one of two CPUs, and reports 20 times a second. The seconds are those of its loop; a ratio is that of
one round. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from distributor import Distributor, runtime
from distributor.callbacks import MLflow
from distributor.tracking import mlflow as module

SECONDS = 0.05  # of a step


def train(steps: int, products: int) -> float:
    """Multiply matrices, report after each step, and return the seconds."""
    import torch

    torch.set_num_threads(1)  # the other CPU is for the driver and the server
    matrix = torch.rand(256, 256)
    for _ in range(products):
        matrix @ matrix
    begun = time.perf_counter()
    for step in range(steps):
        for _ in range(products):
            matrix @ matrix
        runtime.report(step=step, loss=1.0 / (step + 1), accuracy=step / steps)
    return time.perf_counter() - begun


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def start_server(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen([*command, *store], start_new_session=True, stdout=quiet, stderr=quiet, cwd=folder)
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
    return server, f"http://127.0.0.1:{port}"


def seconds(steps: int, products: int, callbacks: Sequence[Any]) -> float:
    ranks = Distributor(1, local_mode=True, use_gpu=False, progress=False, callbacks=callbacks)
    return float(ranks.run(train, steps, products))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    module._PATIENCE = 1.0  # the end of a run whose server is down is not measured
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DISTRIBUTOR_RUNS"] = os.path.join(folder, "runs")
        server, address = start_server(folder)
        try:
            seconds(1, 1, [])
            products = max(1, int(100 * SECONDS / seconds(1, 100, [])))
            systems = {"none": None, "server": address, "server down": f"http://127.0.0.1:{free_port()}"}
            found: dict[str, list[float]] = {name: [] for name in systems}
            for _ in range(options.rounds):
                for name, where in systems.items():
                    callbacks = [] if where is None else [MLflow("/benchmark", where)]
                    found[name].append(seconds(options.steps, products, callbacks))
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    for name, values in found.items():
        ratios = [value / none for value, none in zip(values, found["none"], strict=True)]
        middle, spread = statistics.median(values), f"{min(ratios):.3f}-{max(ratios):.3f}"
        print(f"{name:12} {middle:6.3f} s, {options.steps / middle:4.1f} reports/s", end=", ")
        print(f"{statistics.median(ratios):.4f} x none ({spread}); target below 1.01")


if __name__ == "__main__":
    main()
