"""A driver process for the checkout that PYTHONPATH names: ``python benchmarks/driver.py [MASTER]``.

It reads requests from standard input, one line of JSON each, and answers each with the number of seconds that it took.
With one such process per checkout, checkouts can take turns in a benchmark, each with its own warm process and Spark
session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Checkout:
    """A driver process of a checkout, as seen by the benchmark.

    Args:
        folder: the folder of the checkout.
        master: the Spark master; ``None`` for local mode.
    """

    def __init__(self, folder: str | Path, master: str | None = None) -> None:
        command = [sys.executable, __file__, *([master] if master is not None else [])]
        environ = {**os.environ, "PYTHONPATH": str(Path(folder).resolve()), "PYSPARK_PYTHON": sys.executable}
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def run(self, processes: int, script: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> float:
        """Run a script, and return the seconds from call to result."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"processes": processes, "script": script, "args": list(args), "env": dict(env or {})}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the driver ended while it ran {request}: run it separately to see why")
        return float(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(master: str | None = None) -> None:
    from distributor import TorchDistributor

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Spark's output must not mix with the answers
    if master is not None:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
        builder.config("spark.ui.showConsoleProgress", "false").getOrCreate().sparkContext.setLogLevel("OFF")
    for line in sys.stdin:
        asked = json.loads(line)
        distributor = TorchDistributor(
            asked["processes"], master is None, False, logs="none", progress=False, env=asked["env"]
        )
        start = time.perf_counter()
        distributor.run(asked["script"], *asked["args"])
        print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
