"""Train on a Spark DataFrame, and score its held-out part: a table of scikit-learn's, on this machine or executors.

Without a session on a cluster, the ranks run on this machine. On a cluster, pass a folder that all nodes see.
"""

from __future__ import annotations

import sys
from typing import Any

from distributor import Data, Distributor, runtime, snapshot


def train(epochs: int) -> dict[str, float]:
    """Train a small network; return its accuracy and the loss on the rows that it has not seen, over all ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader = runtime.dataset("train").loader(global_batch_size=48, shuffle=True)
    for epoch in loader.epochs(epochs):
        for batch in loader:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        runtime.report(step=epoch + 1, total_steps=epochs, loss=loss.item())
    right = torch.zeros(2)  # right answers, and rows
    for batch in runtime.dataset("held_out").loader(global_batch_size=48):  # each row once: others are not valid
        valid = batch["_valid"]
        right += torch.stack([((network(batch["x"])[:, 0] > 0) == (batch["y"] > 0))[valid].sum(), valid.sum()])
    dist.all_reduce(right)
    return {"accuracy": (right[0] / right[1]).item(), "rows": int(right[1])}


def main(folder: str | None = None) -> dict[str, float]:
    """Make a DataFrame, train, and print the score. ``folder`` is one that all nodes of a cluster see."""
    from pyspark.sql import SparkSession, functions
    from sklearn.datasets import load_breast_cancer

    spark = SparkSession.builder.getOrCreate()
    table = load_breast_cancer(as_frame=True)
    frame = spark.createDataFrame(table.frame.assign(row=range(len(table.frame))))
    features = [(functions.col(f"`{name}`") / float(table.data[name].max())).alias(name) for name in table.data]
    frame = frame.select(*features, functions.col("target").cast("float").alias("y"), "row").repartition(4)
    options: dict[str, Any] = {"pack": {"x": list(table.data)}, "label": "y", "dtypes": {"x": "float32"}}
    parts = {"train": frame.where("row % 4 > 0"), "held_out": frame.where("row % 4 = 0")}
    data = {name: Data(part, **options) for name, part in parts.items()}
    if folder is not None:
        data = {name: snapshot(each, f"{folder}/{name}") for name, each in data.items()}
    score = Distributor(2, use_gpu=False, data=data).run(train, 30)
    print(f"{score['accuracy']:.1%} of {score['rows']} held-out rows are right")
    return score


if __name__ == "__main__":
    main(*sys.argv[1:2])
