"""Ray Train and Ray Data on the nodes of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import launched
import paths
import pytest
import victims
import watch
from leftovers import Leftovers
from sessions import LOCAL, Make

from distributor import TrainingError

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

#: The system in the table of docs/frameworks.md.
SYSTEM = ("Ray Train", "ray")

LAUNCH = paths.LAUNCHES["ray"]


@pytest.mark.framework(*SYSTEM, "a cluster of the run's nodes")
def test_each_node_offers_its_slots(make: Make, mode: str, leftovers: Leftovers) -> None:
    options: dict[str, Any] = {"cpus_per_process": 1} if mode == LOCAL else {"max_processes_per_node": 1}
    run = make(2, launch=LAUNCH, **options).submit(launched.ray_nodes)
    addresses, cpus = run.result(2 * watch.DEADLINE)
    assert (len(addresses), cpus) == ((1, 2.0) if mode == LOCAL else (2, 2.0))
    assert run.results() == [run.result()]
    leftovers.gone(run.id)


def train_with_ray(storage: str) -> Any:
    """Trains with DDP in two Ray workers, from a Ray data set."""
    import ray.data
    import torch
    from ray.train import Checkpoint, RunConfig, ScalingConfig, report
    from ray.train.torch import TorchTrainer, prepare_model

    def loop(config: dict[str, Any]) -> None:
        import tempfile

        import torch.distributed as dist

        model = prepare_model(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        shard = ray.train.get_dataset_shard("train")
        for _ in range(config["epochs"]):
            for batch in shard.iter_torch_batches(batch_size=8, dtypes=torch.float32):
                x = batch["x"].reshape(-1, 1)
                loss = ((model(x) - 3 * x) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
            report({"loss": float(loss), "world": dist.get_world_size()}, checkpoint=Checkpoint.from_directory(folder))

    data = ray.data.from_items([{"x": number / 32} for number in range(32)])
    trainer = TorchTrainer(
        loop,
        train_loop_config={"epochs": 3},
        scaling_config=ScalingConfig(num_workers=2),
        datasets={"train": data},
        run_config=RunConfig(storage_path=storage),
    )
    return trainer.fit().metrics


@pytest.mark.framework(*SYSTEM, "TorchTrainer with Ray Data")
def test_torch_trainer_with_ray_data(make: Make, tmp_path: Path, leftovers: Leftovers) -> None:
    run = make(3, launch=LAUNCH).submit(train_with_ray, str(tmp_path))
    metrics = run.result(4 * watch.DEADLINE)
    assert metrics["world"] == 2
    assert metrics["loss"] < 10
    leftovers.gone(run.id)


def fail_as_driver() -> None:
    import ray

    ray.init()
    raise ValueError("bad batch")


def fail_in_a_task() -> None:
    import ray

    @ray.remote
    def task() -> None:
        raise ValueError("bad batch")

    ray.get(task.remote())


@pytest.mark.framework(*SYSTEM, "one true error")
@pytest.mark.parametrize("function", [fail_as_driver, fail_in_a_task])
def test_a_failure_is_told(function: Any, make: Make, leftovers: Leftovers) -> None:
    run = make(2, launch=LAUNCH, grace_period=2).submit(function)
    with pytest.raises(TrainingError, match="bad batch"):
        run.result(2 * watch.DEADLINE)
    leftovers.gone(run.id)


KILLS = victims.with_companions(
    head=victims.program(*victims.HEAD),
    raylet=victims.program("raylet"),
    ray_start=victims.program("ray.scripts.scripts"),
)


@pytest.mark.framework(*SYSTEM, "whatever is killed: a true error, nothing left")
@pytest.mark.parametrize(
    ("mode", "victim"),
    victims.cases(["none", *KILLS], ["none", "head", "rank", "agent"], ["raylet", "companion", "executor"]),
    indirect=["mode"],
)
def test_nothing_is_left(victim: str, make: Make, tmp_path: Path, leftovers: Leftovers) -> None:
    run = make(2, launch=LAUNCH, grace_period=2).submit(launched.train_with_ray, str(tmp_path))
    victims.await_ranks("ray", 2, tmp_path)
    victims.strike(run, KILLS.get(victim))
    leftovers.gone(run.id)


@pytest.mark.framework(*SYSTEM, "a killed driver leaves nothing")
def test_a_killed_driver_leaves_nothing(tmp_path: Path, leftovers: Leftovers) -> None:
    victims.kill_a_driver("ray", LOCAL, 2, tmp_path, leftovers)
