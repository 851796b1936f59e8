"""Lightning's Trainer and Fabric: however many devices and nodes the code says, all ranks train together, once each."""

from __future__ import annotations

import importlib.util
from typing import Any

import pandas
import pytest
from driver import driven
from sessions import Make

from distributor import Data, TrainingError, runtime

if importlib.util.find_spec("pytorch_lightning") is None:  # its import takes ten seconds of each process that collects
    pytest.skip("no pytorch_lightning here", allow_module_level=True)

pytestmark = pytest.mark.slow

#: A row of the table in docs/frameworks.md.
ROW = ("Lightning", "pytorch-lightning", "Trainer")

#: Number of samples: divisible by the numbers of ranks here.
SAMPLES = 12


def train(**options: Any) -> dict[str, Any]:
    """Trains for one epoch. How many ranks Lightning sees, and which samples this one has seen."""
    import pytorch_lightning as lightning
    import torch

    seen: list[int] = []

    prepared: list[int] = []

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def prepare_data(self) -> None:
            prepared.append(1)

        def training_step(self, batch: Any, index: int) -> Any:
            seen.extend(int(sample) for sample in batch[0].flatten())
            loss = self.layer(batch[0]).sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES, dtype=torch.float32).reshape(-1, 1))
    quiet = {
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "max_epochs": 1,
    }
    trainer = lightning.Trainer(accelerator="cpu", **quiet, **options)
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
    return {
        "ranks": trainer.world_size,
        "rank": trainer.global_rank,
        "strategy": type(trainer.strategy).__name__,
        "seen": seen,
        "prepared": len(prepared),
        "weight": float(model.layer.weight.detach()),
    }


def assert_together(results: list[dict[str, Any]]) -> None:
    """All ranks have trained one model, on all samples, each once."""
    assert [result["ranks"] for result in results] == [len(results)] * len(results)
    assert [result["rank"] for result in results] == list(range(len(results)))
    assert sorted(sample for result in results for sample in result["seen"]) == list(range(SAMPLES))
    assert len({result["weight"] for result in results}) == 1


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="nothing-said"),
        pytest.param({"strategy": "ddp"}, id="ddp", marks=pytest.mark.long),
        pytest.param({"strategy": "ddp_notebook"}, id="ddp-of-a-notebook", marks=pytest.mark.long),
        pytest.param({"strategy": "ddp", "devices": 1}, id="code-of-one-device", marks=pytest.mark.long),
        pytest.param({"devices": 8}, id="more-devices-than-ranks", marks=pytest.mark.long),
        pytest.param({"devices": 1, "num_nodes": 2}, id="pysparks-recipe", marks=pytest.mark.long),
    ],
)
@pytest.mark.framework(*ROW)
def test_numbers_of_a_trainer_are_those_of_the_run(make_local: Make, options: dict[str, Any]) -> None:
    run = make_local(2, require_group=True).submit(train, **options)
    assert_together(run.results())
    steps = SAMPLES // 2 // 2
    assert {(row.step, row.rank) for row in run.metrics if "loss" in row.values} == {
        (step, rank) for step in range(1, steps + 1) for rank in range(2)
    }
    assert run.progress is not None and run.progress.total == steps


@pytest.mark.ci
@pytest.mark.framework("Lightning", "pytorch-lightning", "Trainer", where="executors")
@pytest.mark.spark
@pytest.mark.parametrize("options", [{}, {"devices": 1, "num_nodes": 2}])
def test_a_trainer_on_executors(sessions: Any, options: dict[str, Any]) -> None:
    from distributor import TorchDistributor

    sessions.get("local-cluster[2,1,1024]")
    assert_together(TorchDistributor(2, False, False, require_group=True).submit(train, **options).results())


def train_twice() -> list[dict[str, Any]]:
    """As in cross-validation: each training has a process group of its own."""
    import torch.distributed as dist

    results = []
    for _ in range(2):
        results.append(train())
        dist.barrier()  # or the other rank might still train
        dist.destroy_process_group()
    return results


def test_two_trainers_one_after_another(make_local: Make) -> None:
    first, second = zip(*make_local(2, require_group=True).submit(train_twice).results())
    assert_together(first)
    assert_together(second)


def of_data() -> list[int]:
    """Trains on the run's data, and returns the rows that this rank has seen."""
    import pytorch_lightning as lightning
    import torch

    seen: list[int] = []

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            seen.extend(batch["y"].int().tolist())
            return self.layer(batch["y"][:, None]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    loader = runtime.dataset("train").loader(global_batch_size=4, shuffle=True)
    lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet).fit(Model(), loader)
    return seen


def test_a_frames_rows_are_not_split_again(make_local: Make) -> None:
    frame = pandas.DataFrame({"y": [float(row) for row in range(SAMPLES)]})
    results = (
        make_local(2, require_group=True, data={"train": Data(frame, lanes=2, dtypes={"y": "float32"})})
        .submit(of_data)
        .results()
    )
    assert sorted(row for seen in results for row in seen) == list(range(SAMPLES))
    assert [len(seen) for seen in results] == [SAMPLES // 2] * 2


def test_nodes_with_different_numbers_of_ranks() -> None:
    """Three ranks on two nodes."""
    with driven(train, num_processes=3) as driver:
        results = driver.values()
    assert_together(results)
    assert [result["prepared"] for result in results] == [1, 0, 1]  # once on each node


def evaluate() -> int | None:
    """Rank 0 has a Trainer of its own."""
    import os

    import pytorch_lightning as lightning

    if os.environ["RANK"] != "0":
        return None
    return int(lightning.Trainer(accelerator="cpu", devices=1, logger=False).world_size)


def test_rank_0_may_have_a_trainer_of_its_own(make_local: Make) -> None:
    assert make_local(2).submit(evaluate).results() == [1, None]


def fabric(**options: Any) -> tuple[int, int, float]:
    import torch
    from lightning_fabric import Fabric

    made = Fabric(**options)
    made.launch()
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    model, optimizer = made.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    made.backward(model(torch.full((1, 1), float(made.global_rank))).sum())
    optimizer.step()
    return made.world_size, made.global_rank, float(model.weight.detach())


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"accelerator": "cpu"}, marks=pytest.mark.long), {"strategy": "ddp", "devices": 4}]
)
@pytest.mark.framework("Lightning", "pytorch-lightning", "Fabric")
def test_numbers_of_fabric_are_those_of_the_run(make: Make, options: dict[str, Any]) -> None:
    zero, one = make(2, require_group=True).submit(fabric, **options).results()
    assert (zero[:2], one[:2]) == ((2, 0), (2, 1))
    assert zero[2] == one[2]


def fabric_without_launch() -> int:
    """As in scripts for ``fabric run``."""
    import torch
    from lightning_fabric import Fabric

    made = Fabric()
    made.setup(torch.nn.Linear(1, 1))
    return int(made.world_size)


def test_scripts_for_fabric_run(make_local: Make) -> None:
    with pytest.raises(TrainingError, match="LT_CLI_USED"):
        make_local(2).run(fabric_without_launch)
    assert make_local(2, env={"LT_CLI_USED": "1"}).submit(fabric_without_launch).results() == [2, 2]


def test_other_numbers_of_devices_are_warned_of(make_local: Make, capfd: pytest.CaptureFixture[str]) -> None:
    make_local(2).run(train, devices=8)
    output = capfd.readouterr()
    text = "[distributor] devices=8 and num_nodes=1 are taken as devices=2 and num_nodes=1, which is how"
    assert (output.out + output.err).count(text) == 1


def own_environment() -> int:
    """Brings a cluster environment, whose numbers count."""
    import pytorch_lightning as lightning
    from pytorch_lightning.plugins.environments import LightningEnvironment

    trainer = lightning.Trainer(accelerator="cpu", devices=3, plugins=[LightningEnvironment()], logger=False)
    return int(trainer.num_devices)


def test_a_users_cluster_environment_sets_the_numbers(make_local: Make) -> None:
    assert make_local(1).run(own_environment) == 3


def two_towers(steps: int) -> dict[str, Any]:
    """Trains a recommender: a tower for users and one for items, whose product is high where a user likes an item.

    Goes on from the checkpoint of an earlier run, which lies at a relative path.
    """
    import os

    import pytorch_lightning as lightning
    import torch
    from pytorch_lightning.callbacks import ModelCheckpoint

    class Towers(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = torch.nn.Embedding(40, 8), torch.nn.Embedding(60, 8)
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            users, items, likes = batch
            scores = (self.users(users) * self.items(items)).sum(dim=1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, likes)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.05)

    torch.manual_seed(0)
    users, items = torch.randint(40, (2000,)), torch.randint(60, (2000,))
    data = torch.utils.data.TensorDataset(users, items, ((users + items) % 2).float())
    model = Towers()
    saving = ModelCheckpoint("ckpt", save_last=True, every_n_train_steps=10)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", max_steps=steps, callbacks=[saving], logger=False, enable_progress_bar=False
    )
    last = "ckpt/last.ckpt" if os.path.exists("ckpt/last.ckpt") else None
    trainer.fit(model, torch.utils.data.DataLoader(data, 50, shuffle=True), ckpt_path=last)
    return {"ranks": trainer.world_size, "step": trainer.global_step, "from": last, "losses": model.losses}


@pytest.mark.framework("Lightning", "pytorch-lightning", "two-tower recommender, resumed")
def test_a_recommender_goes_on_from_its_checkpoint(make: Make, spread: dict[str, Any], tmp_path: Any) -> None:
    (tmp_path / "work").mkdir()
    distributor = make(2, working_dir=tmp_path / "work", output_dir=tmp_path / "out", **spread)
    first = distributor.run(two_towers, 40)
    assert (first["ranks"], first["step"], first["from"]) == (2, 40, None)
    more = distributor.run(two_towers, 80)
    assert (more["step"], more["from"], len(more["losses"])) == (80, "ckpt/last.ckpt", 40)
    assert sum(more["losses"][-10:]) < 0.7 * sum(first["losses"][:10])


def sharded(steps: int) -> dict[str, Any]:
    """Trains with FSDP2 by Lightning's own strategy."""
    import pytorch_lightning as lightning
    import torch
    from pytorch_lightning.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Model(lightning.LightningModule):
        def configure_model(self) -> None:
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return torch.nn.functional.mse_loss(self.layers(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05)

    torch.manual_seed(1)
    x = torch.randn(256, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = lightning.Trainer(accelerator="cpu", strategy=strategy, max_steps=steps, **quiet)
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, 16))
    weight = next(model.parameters())
    return {"ranks": trainer.world_size, "local": weight.to_local().numel(), "all": weight.numel()}


@pytest.mark.framework("Lightning", "pytorch-lightning", "ModelParallelStrategy (FSDP2)")
def test_model_parallel_strategy_shards_a_model(make: Make) -> None:
    results = make(2).submit(sharded, 8).results()
    assert [(result["ranks"], result["local"] * 2) for result in results] == [(2, result["all"]) for result in results]
