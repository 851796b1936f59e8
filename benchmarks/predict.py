"""Measure predictions beside PySpark's ``predict_batch_udf``: medians of rounds; systems take turns.

    python benchmarks/predict.py [narrow heavy large jpeg] [--rows 1000000] [--rounds 5] [--pause 300]

- ``narrow``: a small network, 16 float32 a row, two task slots. ``limit`` is an Arrow function that computes nothing.
- ``heavy``: a network that takes about 1 ms a row, on a hundredth of the rows.
- ``large``: a model of 500 MB, loaded from a file, four task slots; each round is a model that is new. The memory is
  that of all Python processes (PSS) at its largest. With ``--pause``, a model is used again after so many seconds.
- ``jpeg``: pictures of 128 x 128, which Pillow decodes, on a hundredth of the rows. ``map`` decodes in the task,
  ``predict`` where the model computes. ``server`` is written by hand: the tasks decode, and send arrays over a Unix
  socket to a process that has the model.

The first round, which loads the model, is told apart.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

WIDTH, SIDE = 16, 128
COLUMNS = [f"c{index}" for index in range(WIDTH)]
BATCH = {"narrow": 8192, "heavy": 32, "large": 1024, "jpeg": 64}

Load = Callable[[], Any]


def network(width: int, depth: int) -> Load:
    def load() -> Any:
        import torch

        torch.manual_seed(0)
        hidden = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, width), torch.nn.ReLU(), *hidden, torch.nn.Linear(width, 1))

    return load


def convolution() -> Any:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 5, stride=4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))


def from_file(path: str, number: int) -> Load:
    """Another model for each number, with the weights of the same file."""

    def load() -> Any:
        import torch

        class Table(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rows = torch.nn.Embedding.from_pretrained(torch.load(path))
                self.number = number

            def forward(self, x: Any) -> Any:
                return self.rows((x[:, :4] * 1000).long()).sum((1, 2)).unsqueeze(1)

        return Table()

    return load


def decode(pictures: Any) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.stack([np.asarray(Image.open(io.BytesIO(each))) for each in pictures])
    return pixels.transpose(0, 3, 1, 2).astype("float32") / 255


def ours(case: str, frame: Any, load: Load, inputs: Any = COLUMNS, **options: Any) -> Any:
    from distributor import predict

    return predict(load, frame, input={"x": inputs}, output="score float", keep=[], batch_rows=BATCH[case], **options)


def of_function(case: str, frame: Any, load: Load) -> Any:
    def load_with_decoder() -> Any:
        import torch

        model = load().eval()
        return lambda batch: model(torch.from_numpy(decode(batch["x"])))

    return ours(case, frame, load_with_decoder, "picture")


def of_map(case: str, frame: Any, load: Load) -> Any:
    return ours(case, frame, load, "picture", map=lambda inputs: {"x": decode(inputs["x"])})


def peers(case: str, frame: Any, load: Load) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.functions import array
    from pyspark.sql.types import FloatType

    def make() -> Any:
        import torch

        torch.set_num_threads(1)
        model = load().eval()

        def score(x: Any) -> Any:
            with torch.inference_mode():
                return model(torch.from_numpy(decode(x) if case == "jpeg" else x)).numpy()

        return score

    if case == "jpeg":
        return frame.select(predict_batch_udf(make, return_type=FloatType(), batch_size=BATCH[case])("picture"))
    udf = predict_batch_udf(make, return_type=FloatType(), batch_size=BATCH[case], input_tensor_shapes=[[WIDTH]])
    return frame.select(udf(array(*COLUMNS)))


def limit(case: str, frame: Any, load: Load) -> Any:
    def nothing(batches: Any) -> Any:
        import pyarrow

        for batch in batches:
            yield pyarrow.RecordBatch.from_arrays([batch.column(0)], ["score"])

    return frame.mapInArrow(nothing, "score float")


def serve(address: str) -> None:
    """Be the server written by hand: a thread for each task."""
    from multiprocessing.connection import Listener

    import torch

    torch.set_num_threads(1)
    model = convolution().eval()

    def answer(task: Any) -> None:
        with suppress(EOFError), torch.inference_mode():
            while True:
                task.send(model(torch.from_numpy(task.recv())).numpy())

    with Listener(address) as listener:
        while True:
            threading.Thread(target=answer, args=[listener.accept()], daemon=True).start()


def of_server(case: str, frame: Any, load: Load) -> Any:
    address = _server[0]

    def score(batches: Any) -> Any:
        from multiprocessing.connection import Client

        import pyarrow

        with Client(address) as server:
            for batch in batches:
                for start in range(0, batch.num_rows, BATCH["jpeg"]):
                    server.send(decode(batch.column(0)[start : start + BATCH["jpeg"]].to_pylist()))
                    yield pyarrow.RecordBatch.from_arrays([pyarrow.array(server.recv()[:, 0])], ["score"])

    return frame.mapInArrow(score, "score float")


_server: list[str] = []


@contextmanager
def served() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        _server[:] = [f"{folder}/socket"]
        process = subprocess.Popen([sys.executable, __file__, "--serve", _server[0]])
        try:
            while not os.path.exists(_server[0]):
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait()


def pythons() -> dict[int, float]:
    """Memory of each Python process but this one, in MB: of pages that it shares, its share."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(path.name) != os.getpid() and b"python" in (path / "cmdline").read_bytes():
                lines = (path / "smaps_rollup").read_text()
                found[int(path.name)] = int(lines.partition("\nPss:")[2].split()[0]) / 1e3
    return found


@contextmanager
def peak(found: list[float]) -> Iterator[None]:
    """Append the largest memory of Python processes, above that of those that are there now."""
    done, before, most = threading.Event(), pythons(), [0.0]

    def watch() -> None:
        while not done.wait(0.1):
            most.append(sum(size - before.get(pid, 0.0) for pid, size in pythons().items()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found.append(max(most))


def seconds_of(scored: Any) -> float:
    from pyspark.sql import functions

    column, begun = functions.col(scored.columns[0]), time.perf_counter()
    assert scored.agg(functions.count(column)).first()[0] > 0
    return time.perf_counter() - begun


System = Callable[[str, Any, Load], Any]


def rates(case: str, frame: Any, load: Load, systems: dict[str, System], rounds: int) -> None:
    rows = frame.count()
    found: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds + 1):
        for name, system in systems.items():
            found[name].append(rows / seconds_of(system(case, frame, load)))
    for name, values in found.items():
        ratio = statistics.median(values[1:]) / statistics.median(found["predict_batch_udf"][1:])
        print(
            f"{case:8} {name:18} {statistics.median(values[1:]):12,.0f} rows/s "
            f"({min(values[1:]):,.0f} to {max(values[1:]):,.0f}), {ratio:.2f} x, first {rows / values[0]:.2f} s"
        )


def large(frame: Any, rounds: int, pause: float) -> None:
    import torch

    from distributor import release

    systems: dict[str, System] = {"predict": ours, "predict_batch_udf": peers}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    memory: dict[str, list[float]] = {name: [] for name in systems}
    with tempfile.NamedTemporaryFile() as file:
        torch.save(torch.rand(1_950_000, 64), file.name)
        for number in range(rounds):
            for name, system in systems.items():
                release()  # the memory of a model before
                with peak(memory[name]):
                    seconds[name].append(seconds_of(system("large", frame, from_file(file.name, number))))
        for name in systems:
            print(
                f"large    {name:18} {statistics.median(seconds[name]):6.2f} s to load and score "
                f"({min(seconds[name]):.2f} to {max(seconds[name]):.2f}), {statistics.median(memory[name]):,.0f} MB"
            )
        if pause:
            scored = {name: system("large", frame, from_file(file.name, -1)) for name, system in systems.items()}
            for each in scored.values():
                seconds_of(each)
            time.sleep(pause)
            for name, each in scored.items():
                print(f"large    {name:18} {seconds_of(each):6.2f} s after a pause of {pause:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*BATCH], metavar="CASE")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)

    from pyspark.sql import SparkSession, functions

    def session(slots: int) -> Any:
        builder = SparkSession.builder.master(f"local[{slots}]").config("spark.ui.enabled", "false")
        return builder.config("spark.sql.execution.pyspark.python", sys.executable).getOrCreate()

    def numbers(spark: Any, rows: int) -> Any:
        columns = [functions.rand(index).cast("float").alias(name) for index, name in enumerate(COLUMNS)]
        return spark.range(rows, numPartitions=4).select(*columns).cache()

    spark = session(2)
    systems: dict[str, System] = {"predict": ours, "predict_batch_udf": peers}
    if "narrow" in asked.cases:
        rates("narrow", numbers(spark, asked.rows), network(32, 1), {**systems, "limit": limit}, asked.rounds)
    if "heavy" in asked.cases:
        rates("heavy", numbers(spark, asked.rows // 100), network(4096, 2), systems, asked.rounds)
    if "jpeg" in asked.cases:
        frame = pictures(spark, asked.rows // 100)
        with served():
            others = {"predict": of_function, "map": of_map, "server": of_server}
            rates("jpeg", frame, convolution, {**systems, **others}, asked.rounds)
    spark.stop()
    if "large" in asked.cases:
        spark = session(4)
        frame = numbers(spark, 10_000)
        frame.count()
        large(frame, asked.rounds, asked.pause)
        spark.stop()


def pictures(spark: Any, rows: int) -> Any:
    import numpy as np
    from PIL import Image
    from pyspark.sql import functions

    random, made = np.random.default_rng(0), []
    for _ in range(64):
        coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3)).astype(np.uint8))
        file = io.BytesIO()
        coarse.resize((SIDE, SIDE)).save(file, "jpeg")
        made.append((len(made), file.getvalue()))
    known = spark.createDataFrame(made, "number long, picture binary")
    of_rows = spark.range(rows, numPartitions=4).withColumn("number", functions.col("id") % len(made))
    frame = of_rows.join(functions.broadcast(known), "number").select("picture").cache()
    frame.count()
    return frame


if __name__ == "__main__":
    main()
