"""Measure predictions beside PySpark's: rows per second of two task slots, medians of rounds.

    python benchmarks/predict.py [--rows 1000000] [--rounds 5]

A cached DataFrame of 16 float32 is scored by a small network. Systems take turns: ``predict``, PySpark's
``predict_batch_udf``, and an Arrow function that computes nothing (``mapInArrow``), which is the limit. ``heavy`` is a
network that takes about 1 ms a row, on a hundredth of the rows. ``first`` is the first round, which loads the model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

WIDTH = 16
COLUMNS = [f"c{index}" for index in range(WIDTH)]


def network(heavy: bool) -> Callable[[], Any]:
    def load() -> Any:
        import torch

        torch.manual_seed(0)
        width, depth = (4096, 2) if heavy else (32, 1)
        hidden = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, width), torch.nn.ReLU(), *hidden, torch.nn.Linear(width, 1))

    return load


def ours(frame: Any, heavy: bool) -> Any:
    from distributor import predict

    rows = 32 if heavy else 8192
    return predict(network(heavy), frame, input={"x": COLUMNS}, output="score float", keep=[], batch_rows=rows)


def peers(frame: Any, heavy: bool) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.functions import array
    from pyspark.sql.types import FloatType

    def make() -> Any:
        import torch

        torch.set_num_threads(1)
        model = network(heavy)().eval()

        def score(x: Any) -> Any:
            with torch.inference_mode():
                return model(torch.from_numpy(x)).numpy()

        return score

    rows = 32 if heavy else 8192
    udf = predict_batch_udf(make, return_type=FloatType(), batch_size=rows, input_tensor_shapes=[[WIDTH]])
    return frame.select(udf(array(*COLUMNS)).alias("score"))


def limit(frame: Any, heavy: bool) -> Any:
    def nothing(batches: Any) -> Any:
        import pyarrow

        for batch in batches:
            yield pyarrow.RecordBatch.from_arrays([batch.column(0)], ["score"])

    return frame.mapInArrow(nothing, "score float")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()

    from pyspark.sql import SparkSession, functions

    settings = {"spark.ui.enabled": "false", "spark.sql.execution.pyspark.python": sys.executable}
    builder = SparkSession.builder.master("local[2]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    columns = [functions.rand(index).cast("float").alias(name) for index, name in enumerate(COLUMNS)]
    frames = {}
    for heavy, rows in ((False, asked.rows), (True, asked.rows // 100)):
        frames[heavy] = session.range(rows, numPartitions=4).select(*columns).cache()
        frames[heavy].count()
    systems = {"predict": ours, "predict_batch_udf": peers, "limit": limit}
    for heavy, frame in frames.items():
        rows, found = frame.count(), {name: [] for name in systems if not heavy or name != "limit"}
        for _ in range(asked.rounds + 1):
            for name in found:
                scored = systems[name](frame, heavy)
                begun = time.perf_counter()
                assert scored.agg(functions.count("score")).first()[0] == rows
                found[name].append(rows / (time.perf_counter() - begun))
        for name, values in found.items():
            ratio = statistics.median(values[1:]) / statistics.median(found["predict_batch_udf"][1:])
            first = rows / values[0]
            print(
                f"{'heavy ' if heavy else ''}{name:20} {statistics.median(values[1:]):12,.0f} rows/s "
                f"({min(values[1:]):,.0f} to {max(values[1:]):,.0f}), {ratio:.2f} x, first {first:.2f} s"
            )
    session.stop()


if __name__ == "__main__":
    main()
