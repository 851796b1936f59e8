"""Trainings of the tests that keep checkpoints. A module of the user's: it travels by value."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any


def weights(model: Any) -> str:
    """A digest of a model's state, bit by bit."""
    import hashlib

    import torch

    whole = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole.update(name.encode() + bytes(full.detach().reshape(-1).view(torch.uint8).numpy()))
    return whole.hexdigest()


def digits() -> Any:
    """A training on scikit-learn's digits: model, optimizer, scheduler, images and labels."""
    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(32, 10),
    )
    return model, torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def take_nothing() -> None:
    """From now on, nothing can be committed."""
    from distributor.checkpoint.catalog import Catalog

    def commit(*_: Any) -> Any:
        raise OSError("the store is down")

    Catalog.commit = commit  # type: ignore[method-assign]


def committed(folder: Path) -> list[int]:
    """The steps that a new process would find."""
    from distributor import Checkpoints
    from distributor.checkpoint.catalog import Catalog
    from distributor.machine.storage import Folder

    catalog = Catalog(Folder(folder), Checkpoints(str(folder)))
    return [record.step for record in catalog.committed() if catalog.problem(record) is None]


def train_digits(
    steps: int, kill: str | None = None, split: bool = False, down: bool = False, pause: float = 0.0
) -> tuple[int | None, str, Any]:
    """Trains, with a checkpoint after each step. Where it began, the weights at the end, and a value of its own.

    With the path of a file, rank 1 kills itself after half of the steps, once: where the file is not yet. ``down``:
    nothing can be committed. ``pause``: how long each step waits, in seconds.
    """
    import torch
    import torch.distributed as dist

    from distributor import runtime

    if down:
        take_nothing()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain, images, labels = digits()
    if split:
        from torch.distributed.fsdp import fully_shard

        plain[1] = torch.nn.Identity()  # each part of it would see other numbers
        model = fully_shard(plain)
    else:
        # Without this, DDP rebuilds its buckets after the first step, which changes the order of sums over many ranks.
        model = torch.nn.parallel.DistributedDataParallel(plain, find_unused_parameters=dist.get_world_size() > 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    torch.manual_seed(100 + runtime.rank())  # each rank draws its own samples
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": 0}
    begun = runtime.load_checkpoint(state)
    for step in range((begun or 0) + 1, steps + 1):
        chosen = torch.randint(len(images), (16,))
        loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        state["seen"] += len(chosen)
        runtime.report(step=step, loss=loss, pid=os.getpid())
        runtime.save_checkpoint(state, step)
        time.sleep(pause)
        if kill is not None and step == steps // 2 and runtime.rank() == 1 and not os.path.exists(kill):
            open(kill, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    end = weights(plain)
    dist.destroy_process_group()  # the last checkpoint is committed all the same
    return begun, end, state["seen"]


def write_files(step: int, names: dict[int, str], fails: int | None = None) -> Any:
    """Each rank writes one file with its number; the step and the names in the last checkpoint afterwards."""
    from distributor import runtime

    with runtime.checkpoint_folder(step) as folder:
        path = folder / names[runtime.rank()]
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"rank {runtime.rank()}" if "same" not in path.name else "same")
        if runtime.rank() == fails:
            raise ValueError("boom")
    last = runtime.latest_checkpoint()
    if last is None:
        return None
    return last.step, {
        str(path.relative_to(last.path)): path.read_text() for path in sorted(last.path.rglob("*[0-9e]"))
    }


def save_until_killed(ready: str) -> None:
    """Saves again and again, and says what it has begun."""
    import torch
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)}
    step = runtime.load_checkpoint(state) or 0
    assert step == 0 or bool((model.weight == step).all())
    while True:
        step += 1
        with torch.no_grad():
            model.weight.fill_(step)
        runtime.save_checkpoint(state, step)
        if runtime.rank() == 0:
            with open(ready, "a") as file:
                file.write(f"{step}\n")


#: The attempt of each step that this process has ended.
_ended: list[int] = []


def kill_soon(kills: int) -> None:
    """At the end of a step: one of two ranks is killed within a moment, in each of the first so many attempts.

    It comes at a random time, but after three steps at the latest, so that steps are left for all kills. Every second
    attempt first commits a checkpoint, however slow the machine: a run that comes no further is not started again.
    """
    from distributor import runtime

    _ended.append(runtime.attempt())
    if len(_ended) == 1 + runtime.attempt() % 2:
        _kill(kills, random.Random(runtime.attempt()).uniform(0.0, 0.2))
    elif len(_ended) == 3:
        _kill(kills, 0.0)


def wait_for_kills(kills: int) -> None:
    """All kills have come when this returns."""
    from distributor import runtime

    if runtime.attempt() < kills:
        _kill(kills, 0.0)
        time.sleep(60)


def _kill(kills: int, delay: float) -> None:
    """Kill the rank whose turn it is, in so many seconds."""
    from distributor import runtime

    attempt = runtime.attempt()
    if attempt < kills and runtime.rank() == attempt % 2:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


def train_with_trainer(folder: str, steps: int, kills: int) -> tuple[int, str]:
    """Trains with Hugging Face's Trainer, which saves after each step; where it began, and the weights."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from distributor import runtime

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    class Commit(TrainerCallback):  # type: ignore[misc]  # transformers is not always there
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            torch.distributed.barrier()  # each rank has written its files
            with runtime.checkpoint_folder(state.global_step) as kept:
                if runtime.rank() == 0:
                    shutil.copytree(f"{args.output_dir}/checkpoint-{state.global_step}", kept, dirs_exist_ok=True)

    class Kill(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            kill_soon(kills)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = [{"x": torch.randn(8), "labels": number % 4} for number in range(48)]
    last = runtime.latest_checkpoint()
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        save_steps=1,
        save_total_limit=2,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(Net(), arguments, train_dataset=data, callbacks=[Kill(), Commit()])
    trainer.train(resume_from_checkpoint=None if last is None else str(last.path))
    wait_for_kills(kills)
    return 0 if last is None else last.step, weights(trainer.model)


def train_with_lightning(folder: str, steps: int, kills: int) -> tuple[int, str]:
    """Trains with Lightning's Trainer, saved after each epoch; where it began, and the weights."""
    import pytorch_lightning as pl
    import torch

    from distributor import runtime

    class Net(pl.LightningModule):  # type: ignore[misc]  # Lightning is not always there
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    class Commit(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            kill_soon(kills)
            with runtime.checkpoint_folder(trainer.global_step) as kept:
                trainer.save_checkpoint(kept / "model.ckpt")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, data = Net(), torch.randn(8, 8)
    last = runtime.latest_checkpoint()
    trainer = pl.Trainer(
        max_epochs=steps,
        callbacks=[Commit()],
        accelerator="cpu",
        devices=runtime.local_world_size(),
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    trainer.fit(net, loader, ckpt_path=None if last is None else str(last.path / "model.ckpt"))
    wait_for_kills(kills)
    return 0 if last is None else last.step, weights(net)


def train_with_deepspeed(folder: str, steps: int, kills: int) -> tuple[int, str]:
    """Trains with DeepSpeed's engine, saved after each step; where it began, and the weights."""
    return train_with("DeepSpeed", steps, kills)


def train_with(name: str, steps: int, kills: int = 0) -> tuple[int, str]:
    """Trains with a library that writes its own files, each after each step; where it began, and the weights."""
    import torch

    from distributor import runtime

    torch.set_num_threads(1)
    torch.manual_seed(0)
    library = _LIBRARIES[name](torch.nn.Linear(8, 4))
    last = runtime.latest_checkpoint()
    if last is not None:
        library.load(str(last.path))
    begun = 0 if last is None else last.step
    for step in range(begun + 1, steps + 1):
        torch.manual_seed(1000 * step + runtime.rank())
        library.step(torch.randn(6, 8))
        kill_soon(kills)
        with runtime.checkpoint_folder(step) as folder:
            library.save(str(folder))
    wait_for_kills(kills)
    return begun, weights(library.plain)


class _Dcp:
    """DDP, with torch.distributed.checkpoint."""

    def __init__(self, model: Any) -> None:
        import torch

        torch.distributed.init_process_group("gloo")
        self.plain, self.model = model, torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(batch).pow(2).mean().backward()
        self.optimizer.step()

    def save(self, folder: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": self.plain.state_dict()}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load({"model": self.plain.state_dict()}, checkpoint_id=folder)


class _Accelerate:
    """Accelerate, which also saves random states."""

    def __init__(self, model: Any) -> None:
        import torch
        from accelerate import Accelerator

        self.accelerator = Accelerator()
        self.plain = model
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.accelerator.backward(self.model(batch).pow(2).mean())
        self.optimizer.step()

    def save(self, folder: str) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: str) -> None:
        self.accelerator.load_state(folder)


class _DeepSpeed:
    """DeepSpeed's engine with ZeRO-2."""

    def __init__(self, model: Any) -> None:
        import deepspeed

        from distributor import runtime

        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=runtime.deepspeed_config()
        )
        self.plain = self.engine.module

    def step(self, batch: Any) -> None:
        self.engine.backward(self.engine(batch).pow(2).mean())
        self.engine.step()

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder, tag="model")

    def load(self, folder: str) -> None:
        self.engine.load_checkpoint(folder, tag="model")


_LIBRARIES: dict[str, Any] = {"DCP": _Dcp, "Accelerate": _Accelerate, "DeepSpeed": _DeepSpeed}


def save_steps(steps: int) -> None:
    """Saves a value after each step."""
    from distributor import runtime

    for step in range(1, steps + 1):
        runtime.save_checkpoint({"value": step}, step)


def load_value() -> int:
    """The value in the last checkpoint."""
    from distributor import runtime

    state = {"value": 0}
    assert runtime.load_checkpoint(state) == state["value"]
    return state["value"]


class Told:
    """Takes notes of checkpoints that count."""

    def __init__(self) -> None:
        self.checkpoints: list[tuple[int, str]] = []

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        self.checkpoints.append((checkpoint.step, checkpoint.path))
