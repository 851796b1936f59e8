"""Ray Train and Ray Data on the nodes of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launched
import psutil
import pytest
import victims
import watch
from sessions import LOCAL, Make

from distributor import TrainingError
from distributor.launch import Ray

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

#: The system in the table of docs/frameworks.md.
SYSTEM = ("Ray Train", "ray")

LAUNCH = Ray(object_store_memory="100m")


def gone(run: Any) -> None:
    """Waits until nothing of Ray is left that this test has started."""
    watch.gone(run.id)
    watch.until(lambda: not rays(run.id), watch.ORPHAN_DEADLINE)
    watch.until(lambda: not [*Path("/tmp").glob(f"dr-{run.id}-*")])  # Ray's folder where names would be too long


def rays(run: str) -> list[psutil.Process]:
    """The Ray processes of a run: its folder is in their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if run in line and process.pid != os.getpid():
            found.append(process)
    return found


@pytest.mark.framework(*SYSTEM, "a cluster of the run's nodes")
def test_each_node_offers_its_slots(make: Make, mode: str) -> None:
    options: dict[str, Any] = {"cpus_per_process": 1} if mode == LOCAL else {"max_processes_per_node": 1}
    run = make(2, launch=LAUNCH, **options).submit(launched.ray_nodes)
    addresses, cpus = run.result(2 * watch.DEADLINE)
    assert (len(addresses), cpus) == ((1, 2.0) if mode == LOCAL else (2, 2.0))
    assert run.results() == [run.result()]
    gone(run)


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
def test_torch_trainer_with_ray_data(make: Make, tmp_path: Path) -> None:
    run = make(3, launch=LAUNCH).submit(train_with_ray, str(tmp_path))
    metrics = run.result(4 * watch.DEADLINE)
    assert metrics["world"] == 2
    assert metrics["loss"] < 10
    gone(run)


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
def test_a_failure_is_told(function: Any, make: Make) -> None:
    run = make(2, launch=LAUNCH, grace_period=2).submit(function)
    with pytest.raises(TrainingError, match="bad batch"):
        run.result(2 * watch.DEADLINE)
    gone(run)


def stay(path: str) -> None:
    import ray

    ray.init()
    Path(path).touch()
    time.sleep(600)


def named(run: Any, part: str) -> psutil.Process:
    """A process of Ray by a part of its command line."""
    return next(process for process in rays(run.id) if part in " ".join(process.cmdline()))


def children(run: Any, name: str) -> Iterator[psutil.Process]:
    """The children of this package's processes of a kind."""
    for process in watch.processes(run.id):
        if watch.part(process) == name:
            yield from process.children()


KILLS = victims.kills(
    "ray",
    rank=lambda run: next(children(run, "launcher")),
    head=lambda run: named(run, "gcs_server"),
    raylet=lambda run: named(run, "raylet/raylet"),
    ray_start=lambda run: named(run, "ray.scripts.scripts"),
)


@pytest.mark.framework(*SYSTEM, "whatever is killed: a true error, nothing left")
@pytest.mark.parametrize("victim", ["none", *KILLS])
def test_nothing_is_left(victim: str, make: Make, mode: str, tmp_path: Path) -> None:
    victims.skip_if_absent(victim, mode)
    before = {*os.listdir("/dev/shm")}
    run = make(2, launch=LAUNCH, grace_period=2).submit(stay, str(tmp_path / "here"))
    watch.until(lambda: (tmp_path / "here").exists(), 2 * watch.DEADLINE)
    victims.strike(run, KILLS.get(victim))
    gone(run)
    watch.until(lambda: not [folder for folder in watch.folders() if run.id in folder.name])
    assert not [name for name in {*os.listdir("/dev/shm")} - before if "plasma" in name]


@pytest.mark.framework(*SYSTEM, "a killed driver leaves nothing")
def test_a_killed_driver_leaves_nothing(tmp_path: Path) -> None:
    here = tmp_path / "here"
    run = victims.kill_a_driver(Path(__file__), here, here.exists)
    watch.until(lambda: not rays(run), watch.ORPHAN_DEADLINE)
    watch.gone(run)
