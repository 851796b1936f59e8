"""What ranks of launch paths other than torchrun's run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def jax_total() -> list[float]:
    """Adds a number of each process up, in each process."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import PartitionSpec as P

    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("i",))
    local = jnp.ones((1,)) * (jax.process_index() + 1)
    whole = multihost_utils.host_local_array_to_global_array(local, mesh, P("i"))
    added = jax.jit(lambda x: x.sum(), out_shardings=jax.sharding.NamedSharding(mesh, P()))(whole)
    return [float(added), jax.process_index(), jax.process_count(), jax.local_device_count()]


def mpi_total() -> list[float]:
    """Adds a number of each process up: with MPI, and with torch beside it."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    dist.init_process_group("gloo")
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [float(world.allreduce(world.rank + 1)), float(total), world.rank, world.size, int(os.environ["RANK"])]


#: The program that ranks start with MPI_Comm_spawn.
SPAWNED = str(Path(__file__).with_name("spawned.py"))


def spawn(number: int, *command: str, **info: str) -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Spawn(sys.executable, command, number, MPI.Info.Create(info))


def add_with_spawned(number: int, *command: str, **info: str) -> Any:
    """Adds numbers up with processes that the ranks spawn; returns the total, and what those processes say."""
    spawned = spawn(number, *command, **info)
    merged = spawned.Merge()
    total = merged.allreduce(1)
    seen = merged.gather(None) or []
    merged.Free()  # with Open MPI 5.0.11, Disconnect would hang
    spawned.Disconnect()
    return total, [result for result in seen if result is not None]


def here(folder: str, name: str = "") -> None:
    """Says in a file that this process does what it is for; the file has its rank's or its task's name, and its pid."""
    path = Path(folder, name or os.environ["RANK"])
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def train_with_mpi(folder: str, steps: int = 10**9) -> int:
    """So many all-reduces."""
    from mpi4py import MPI

    MPI.COMM_WORLD.barrier()
    here(folder)
    for _ in range(steps):
        MPI.COMM_WORLD.allreduce(1)
        time.sleep(0.01)
    return steps


def train_with_openmpis_variables(folder: str, steps: int = 10**9) -> int:
    """So many all-reduces of torch's, with ranks known from Open MPI's variables."""
    import torch
    import torch.distributed as dist

    by_openmpis_variables()
    here(folder)
    for _ in range(steps):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
    return steps


def train_with_jax(folder: str, steps: int = 10**9) -> int:
    """So many sums over all processes."""
    import jax
    from jax.experimental import multihost_utils

    jax.distributed.initialize()
    multihost_utils.sync_global_devices("begin")
    here(folder)
    for _ in range(steps):
        multihost_utils.process_allgather(jax.process_index())
        time.sleep(0.01)
    return steps


def train_with_tensorflow(folder: str, steps: int = 10**9) -> int:
    """So many steps of workers that mirror each other."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def step() -> None:
        context = tf.distribute.get_replica_context
        strategy.run(lambda: context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(1.0)))

    step()
    here(folder)
    for _ in range(steps - 1):
        step()
        time.sleep(0.01)
    return steps


def train_with_parameter_servers(folder: str, steps: int = 10**9, fail: str = "") -> int | None:
    """So many steps of a chief, for whose end an evaluator waits; servers return nothing. A task may fail at once."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    name = f"{resolver.task_type} {resolver.task_id}"
    if name == fail:
        raise ValueError("bad batch")
    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        here(folder, name)
        server.join()
    if resolver.task_type == "evaluator":
        here(folder, name)
        while not Path(folder, "trained").exists():
            time.sleep(0.05)
        return steps
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(0.0)
    schedule = tf.function(lambda: strategy.run(lambda: weight.assign_add(1.0)))
    for step in range(steps):
        coordinator.schedule(schedule)
        if step == 0:
            coordinator.join()
            here(folder, name)
        time.sleep(0.01)
    coordinator.join()
    Path(folder, "trained").touch()
    return int(weight.numpy())


def train_with_ray(folder: str, steps: int = 10**9) -> int:
    """So many rounds of tasks."""
    import ray

    @ray.remote
    def task() -> int:
        return 1

    for step in range(steps):
        assert ray.get(task.remote()) == 1
        if step == 0:
            here(folder)
        time.sleep(0.01)
    return steps


def by_openmpis_variables() -> list[float]:
    """Knows its place from Open MPI's variables, and where rank 0 is from Azure's."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"tcp://{os.environ['AZ_BATCH_MASTER_NODE']}", rank=rank, world_size=size
    )
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return [float(total), int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]), int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])]


def mirror() -> list[float]:
    """Trains y = 3 x in a loop of its own."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(0.0)

    def step() -> Any:
        x = tf.constant([1.0, 2.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((weight * x - 3.0 * x) ** 2)
        gradient = tape.gradient(loss, weight)
        context = tf.distribute.get_replica_context()
        weight.assign_sub(0.1 * context.all_reduce(tf.distribute.ReduceOp.MEAN, gradient))
        return loss

    run = tf.function(lambda: strategy.run(step))
    for _ in range(40):
        run()
    return [round(float(weight.numpy()), 2), strategy.num_replicas_in_sync]


def resnet18(width: int = 8, classes: int = 10) -> Any:
    """A ResNet-18 for images like those of FashionMNIST, with fewer channels."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels: int, out: int, stride: int) -> None:
            super().__init__()
            self.path = nn.Sequential(
                nn.Conv2d(channels, out, 3, stride, 1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
                nn.Conv2d(out, out, 3, 1, 1, bias=False),
                nn.BatchNorm2d(out),
            )
            same = channels == out and stride == 1
            self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.path(x) + self.shortcut(x))

    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for out, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Block(channels, out, stride), Block(out, out, 1)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def train_resnet_with_ray(storage: str, workers: int, spread: bool = False) -> dict[str, Any]:
    """Trains a ResNet-18 with Ray Train and Ray Data on images that are their class's pattern under noise."""
    import numpy as np
    import ray.data
    import torch
    from ray.train import Checkpoint, RunConfig, ScalingConfig, report
    from ray.train.torch import TorchTrainer, prepare_model

    def loop(config: dict[str, Any]) -> None:
        import tempfile

        import torch.distributed as dist

        torch.manual_seed(dist.get_rank())
        model = prepare_model(resnet18())
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        shard, losses = ray.train.get_dataset_shard("train"), []
        types = {"image": torch.float32, "label": torch.int64}
        for _ in range(config["epochs"]):
            for batch in shard.iter_torch_batches(batch_size=16, dtypes=types):
                loss = torch.nn.functional.cross_entropy(model(batch["image"].unsqueeze(1)), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss))
        mine = {
            "weights": sum(float(parameter.detach().double().sum()) for parameter in model.parameters()),
            "address": ray.util.get_node_ip_address(),
            "torchruns": [name for name in os.environ if name.startswith("TORCHELASTIC")],
        }
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
            report({"losses": losses, "workers": gathered}, checkpoint=Checkpoint.from_directory(folder))

    random = np.random.default_rng(0)
    patterns = random.normal(size=(10, 28, 28))
    images = [
        {"image": (patterns[number % 10] + 0.3 * random.normal(size=(28, 28))).astype("float32"), "label": number % 10}
        for number in range(96)
    ]
    trainer = TorchTrainer(
        loop,
        train_loop_config={"epochs": 4},
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="STRICT_SPREAD" if spread else "PACK"),
        datasets={"train": ray.data.from_items(images)},
        run_config=RunConfig(storage_path=storage),
    )
    return dict(trainer.fit().metrics)


def assert_trained(metrics: dict[str, Any], workers: int) -> None:
    """Asserts that the ResNet-18 has learned, that all workers have the same one, and nothing of torchrun's."""
    assert len({worker["weights"] for worker in metrics["workers"]}) == 1
    assert [worker["torchruns"] for worker in metrics["workers"]] == [[]] * workers
    assert metrics["losses"][-1] < metrics["losses"][0] / 2


def ray_nodes() -> tuple[list[str], float]:
    """Returns the addresses of Ray's nodes, and how many CPUs they have."""
    import ray

    ray.init()
    nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    return sorted(nodes), ray.cluster_resources()["CPU"]
