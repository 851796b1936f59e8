"""Measure loaders of a table of 16 float32 and a label, beside peers: rows per second of one core, medians of rounds.

    python benchmarks/data.py [--rows 1000000] [--rounds 5] [--spark] [--peers]

Each system reads shuffled batches of 1,024 rows for one epoch, in a process that is pinned to one core. Systems take
turns. ``gather`` takes the rows of each batch from a table in memory (``index_select``), which no shuffled loader can
beat. With ``--spark``, a snapshot is written beside ``write.parquet`` of the same frame, and PySpark's private loader
of ``_train_on_dataframe`` reads what that method would. With ``--peers``, mosaicml-streaming and LitData, which must be
installed, read copies of the table in their own formats. ``images`` are 32 x 32 bytes in a binary column, which a
function decodes: for a batch at a time in ``map=``, for each image in the DataLoader's dataset, which has them in
memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

BATCH, LANES, WIDTH = 1024, 64, 16


def write(folder: str, rows: int) -> None:
    """Write the table as a snapshot."""
    import numpy as np
    import pyarrow as pa

    from distributor import Data, snapshot

    random = np.random.default_rng(0)
    columns = {f"c{index}": random.random(rows, dtype=np.float32) for index in range(WIDTH)}
    table = pa.table({**columns, "y": np.arange(rows, dtype=np.int64)})
    snapshot(Data(table, pack={"x": list(columns)}, label="y"), folder)


def loader(folder: str, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    from distributor.data.loader import RankDataset
    from distributor.values.dataset import Dataset

    table = RankDataset.open(Dataset(folder, LANES), rank, world_size)
    return table.loader(global_batch_size=BATCH, shuffle=True, **options)


def tensors(folder: str) -> tuple[Any, Any]:
    import torch

    whole = [(batch["x"], batch["y"]) for batch in loader(folder)]
    return torch.cat([x for x, _ in whole]), torch.cat([y for _, y in whole])


def ours(folder: str, rank: int = 0, world_size: int = 1) -> tuple[int, float]:
    return _second_epoch(loader(folder, rank, world_size))


def _second_epoch(batches: Any) -> tuple[int, float]:
    """Our checksums are compared during the first."""
    for _ in batches:
        pass
    begun, rows = time.perf_counter(), 0
    for batch in batches:
        rows += len(batch["y"])
    return rows, time.perf_counter() - begun


def gather(folder: str) -> tuple[int, float]:
    import torch

    x, y = tensors(folder)
    order = torch.randperm(len(y))
    begun = time.perf_counter()
    for index in order.split(BATCH):
        x.index_select(0, index), y.index_select(0, index)
    return len(y), time.perf_counter() - begun


def plain(folder: str) -> tuple[int, float]:
    """A DataLoader that fetches whole batches of a table in memory."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

    data = TensorDataset(*tensors(folder))
    sampler = BatchSampler(RandomSampler(data), BATCH, drop_last=True)
    begun, rows = time.perf_counter(), 0
    for _, y in DataLoader(data, sampler=sampler, batch_size=None):
        rows += len(y)
    return rows, time.perf_counter() - begun


def pysparks(folder: str) -> tuple[int, float]:
    """PySpark's loader of a partition, over the same rows; it does not shuffle."""
    import pyarrow as pa
    from pyspark.ml.torch.data import _SparkPartitionTorchDataset as Reader
    from pyspark.sql.types import ArrayType, FloatType, LongType, StructField, StructType
    from torch.utils.data import DataLoader

    x, y = tensors(folder)
    path = os.path.join(folder, "partition.arrow")
    table = pa.table({"x": list(x.numpy()), "y": y.numpy()})
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, 10_000)
    schema = StructType([StructField("x", ArrayType(FloatType())), StructField("y", LongType())])
    begun, rows = time.perf_counter(), 0
    for _, labels in DataLoader(Reader(path, schema, len(y)), BATCH):
        rows += len(labels)
    return rows, time.perf_counter() - begun


def _by_rows(batches: Any) -> tuple[int, float]:
    begun, rows = time.perf_counter(), 0
    for batch in batches:
        rows += len(batch["y"])
    return rows, time.perf_counter() - begun


def mds(folder: str) -> tuple[int, float]:
    """mosaicml-streaming: shards in a local folder, shuffled, in its own loader."""
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    path = os.path.join(folder, "mds")
    if not os.path.exists(path):
        x, y = tensors(folder)
        with MDSWriter(out=path, columns={"x": f"ndarray:float32:{WIDTH}", "y": "int"}) as writer:
            for row, label in zip(x.numpy(), y.tolist()):
                writer.write({"x": row, "y": label})
    data = StreamingDataset(local=path, shuffle=True, batch_size=BATCH)
    return _by_rows(StreamingDataLoader(data, batch_size=BATCH, drop_last=True))


def _rows(folder: str) -> Iterator[dict[str, Any]]:
    for row, label in zip(*tensors(folder)):
        yield {"x": row, "y": int(label)}


def litdata(folder: str) -> tuple[int, float]:
    """LitData: chunks of 64 MB in a local folder, shuffled, in its own loader."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    path = os.path.join(folder, "litdata")
    if not os.path.exists(path):
        optimize(fn=_rows, inputs=[folder], output_dir=path, chunk_bytes="64MB", num_workers=1)
    return _by_rows(StreamingDataLoader(StreamingDataset(path, shuffle=True), batch_size=BATCH, drop_last=True))


def resume(folder: str) -> tuple[int, float]:
    """From a request in the middle of an epoch to its first batch, at twice the width."""
    before = loader(folder)
    state = {**before.state_dict(), "epoch": 3, "step": len(before) // 2}
    begun = time.perf_counter()
    made = loader(folder, 1, 2)
    made.load_state_dict(state)
    next(iter(made))
    return 1, time.perf_counter() - begun


def write_images(folder: str, rows: int) -> None:
    """Write images of 1 KiB as a snapshot."""
    import numpy as np
    import pyarrow as pa

    from distributor import snapshot

    pixels = np.random.default_rng(0).integers(0, 256, (rows, 1024)).astype(np.uint8)
    images = pa.array([each.tobytes() for each in pixels], pa.binary())
    snapshot(pa.table({"image": images, "y": np.arange(rows, dtype=np.int64)}), folder)


def images(folder: str) -> tuple[int, float]:
    import torch

    def decode(batch: Any) -> Any:
        pixels = torch.frombuffer(bytearray().join(batch["image"]), dtype=torch.uint8)
        return {"x": pixels.view(-1, 32, 32), "y": batch["y"]}

    return _second_epoch(loader(folder, map=decode))


def plain_images(folder: str) -> tuple[int, float]:
    """A DataLoader without workers: on one core, they made it slower."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    batches = list(loader(folder))
    found = [image for batch in batches for image in batch["image"]]
    labels = torch.cat([batch["y"] for batch in batches])

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return len(found)

        def __getitem__(self, index: int) -> Any:
            pixels = torch.frombuffer(bytearray(found[index]), dtype=torch.uint8)
            return {"x": pixels.view(32, 32), "y": labels[index]}

    return _second_epoch(DataLoader(Images(), BATCH, shuffle=True, drop_last=True))


def peak() -> float:
    """This process's largest memory so far, in MB; ``getrusage`` would count its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e3


def memory(folder: str) -> tuple[int, float]:
    """Memory above that of a process that has imported torch, in MB."""
    before = peak()
    ours(folder)
    return 1, peak() - before


SYSTEMS: dict[str, Callable[..., tuple[int, float]]] = {
    each.__name__: each for each in (gather, ours, plain, pysparks, mds, litdata, images, plain_images, resume, memory)
}


def alone(system: str, folder: str, core: int = 0, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--only", system, folder, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    core = sorted(os.sched_getaffinity(0))[core]
    return subprocess.Popen(["taskset", "-c", str(core), *command], env=env, stdout=subprocess.PIPE, text=True)


def value(process: subprocess.Popen[str]) -> tuple[int, float]:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(process.returncode)
    rows, seconds = out.split()[-2:]
    return int(rows), float(seconds)


def spark(rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a snapshot and of ``write.parquet``, of a cached frame."""
    from pyspark.sql import SparkSession, functions

    from distributor import Data
    from distributor.data import snapshots

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    columns = [functions.rand(index).cast("float").alias(f"c{index}") for index in range(WIDTH)]
    frame = session.range(rows, numPartitions=4).select(*columns, functions.col("id").alias("y")).cache()
    frame.count()
    found: dict[str, list[float]] = {"snapshot": [], "write.parquet": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds + 1):
            shutil.rmtree(f"{folder}/snapshot", ignore_errors=True)
            begun = time.perf_counter()
            snapshots.write(Data(frame, pack={"x": [f"c{i}" for i in range(WIDTH)]}, label="y"), f"{folder}/snapshot")
            found["snapshot"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            frame.write.mode("overwrite").parquet(f"{folder}/parquet")
            found["write.parquet"].append(time.perf_counter() - begun)
    session.stop()
    return {name: seconds[1:] for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spark", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        import torch

        torch.set_num_threads(1)
        system, folder, *arguments = asked.only
        print(*SYSTEMS[system](folder, *map(int, arguments)))
        return
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        table = os.path.join(folder, "table")
        write(table, asked.rows)
        pictures = os.path.join(folder, "images")
        write_images(pictures, asked.rows // 10)
        for _ in range(asked.rounds):
            others = [*(["pysparks"] if asked.spark else []), *(["mds", "litdata"] if asked.peers else [])]
            for system in ("gather", "ours", "plain", *others, "resume", "memory"):
                rows, taken = value(alone(system, table))
                found.setdefault(system, []).append(taken if rows == 1 else rows / taken / 1e6)
            for system in ("images", "plain_images"):
                rows, taken = value(alone(system, pictures))
                found.setdefault(system, []).append(rows / taken / 1e6)
            both = [alone("ours", table, core, str(core), "2") for core in range(2)]
            rates = [rows / seconds / 1e6 for rows, seconds in map(value, both)]
            found.setdefault("ours, two ranks", []).append(sum(rates))
    units = {"resume": "s", "memory": "MB"}
    for system, values in found.items():
        span = f"{min(values):.3g} to {max(values):.3g}"
        ratio = f", {statistics.median(values) / statistics.median(found['gather']):.2f} x gather"
        unit = units.get(system, "M rows/s")
        print(f"{system:16} {statistics.median(values):8.3g} {unit} ({span}){'' if system in units else ratio}")
    if asked.spark:
        for system, values in spark(asked.rows, asked.rounds).items():
            print(f"{system:16} {statistics.median(values):8.3g} s ({min(values):.3g} to {max(values):.3g})")


if __name__ == "__main__":
    main()
