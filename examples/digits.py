"""Train a small network on handwritten digits with DistributedDataParallel; the same function runs anywhere.

``make demo`` trains on this machine without Spark. Then, the same call trains on Spark with two executors. The data are
the 1,797 digits that come with scikit-learn (8 x 8 pixels, ten classes).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any


def train(epochs: int = 30, learning_rate: float = 0.05, batch_size: int = 32) -> dict[str, Any]:
    """Train on three quarters of the digits; every rank calls this function, each with its own share of them.

    Args:
        epochs: number of passes over the training data.
        learning_rate: learning rate of SGD with momentum 0.9.
        batch_size: number of digits in a step, over all ranks.

    Returns:
        ``accuracy`` on the held-out quarter (0 to 1), ``loss`` of the last epoch, ``weights`` (state dict).
    """
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    use_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")

    pixels, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(pixels / 16.0, labels, test_size=0.25, random_state=0)
    data = TensorDataset(torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train))
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=batch_size // world_size, sampler=sampler)

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if rank == 0 and epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {total.item() / len(loader):.4f}")

    with torch.no_grad():
        predicted = network(torch.tensor(x_test, dtype=torch.float32, device=device)).argmax(dim=1).cpu()
    accuracy = (predicted == torch.tensor(y_test)).float().mean().item()
    dist.destroy_process_group()
    weights = {name: value.cpu() for name, value in network.state_dict().items()}
    return {"accuracy": accuracy, "loss": total.item() / len(loader), "weights": weights}


def main() -> None:
    """Train locally and, if there is Java, on Spark with two executors. Print the accuracy and where the time went."""
    import pyspark
    import torch

    from distributor import TorchDistributor
    from distributor.schedulers.spark import java

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--master", default="local-cluster[2,1,1024]", help="Spark master for the second part")
    parser.add_argument("--use-gpu", action="store_true")
    options = parser.parse_args()

    print(f"--- {options.num_processes} ranks on this machine, without Spark")
    local = show(TorchDistributor(options.num_processes, local_mode=True, use_gpu=options.use_gpu))
    if (reason := java.problem(pyspark.__version__)) is not None:
        print(f"The part on Spark is left out: {reason}")
        return

    from pyspark.sql import SparkSession

    print(f"--- the same function on Spark, master {options.master}")
    spark = (
        SparkSession.builder.master(options.master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    try:
        remote = show(TorchDistributor(options.num_processes, use_gpu=options.use_gpu))
    finally:
        spark.stop()
    same = all(torch.allclose(local["weights"][name], remote["weights"][name], atol=1e-5) for name in local["weights"])
    print(f"weights equal up to float noise: {same}")
    if not same or min(local["accuracy"], remote["accuracy"]) < 0.95:
        sys.exit(1)


def show(distributor: Any) -> dict[str, Any]:
    """Train once, print placement, accuracy and seconds by phase, and return the result."""
    start = time.perf_counter()
    run = distributor.submit(train)
    result: dict[str, Any] = run.result()
    print(f"{run.placement}")
    print(f"accuracy on held-out digits {result['accuracy']:.4f}, {time.perf_counter() - start:.1f} s:")
    print("  " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in run.timings.items()))
    return result


if __name__ == "__main__":
    main()
