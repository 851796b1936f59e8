"""A driver of a named training, as a program: ``resumed.py MODE FOLDER STEPS PAUSE``. Says its run, then its result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import checkpointed

from distributor import Distributor


def main(mode: str, folder: str, steps: str, pause: str) -> None:
    local = mode == "local"
    if not local:
        from pyspark.sql import SparkSession

        session = SparkSession.builder.master(mode).config("spark.ui.enabled", "false").getOrCreate()
        session.sparkContext.setLogLevel("OFF")
    distributor = Distributor(2, local, False, name="digits", checkpoints=folder, logs="none", grace_period=1)
    run = distributor.submit(checkpointed.train_digits, int(steps), pause=float(pause))
    print(run.id, flush=True)
    begun, weights, seen = run.result()
    print(json.dumps({"begun": begun, "weights": weights, "seen": seen}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
