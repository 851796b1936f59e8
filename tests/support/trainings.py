"""Training functions of the tests. A module of the user's, as far as the package knows: it travels by value."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


class Diverged(Exception):
    """A user's own exception."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Checkpoint:
    """A user's own class as return value."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def rank() -> int:
    return int(os.environ["RANK"])


def squared() -> Any:
    """A model as Transformers' Trainer takes it: called with its inputs by name, it returns a loss."""
    import torch

    class Squared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            return {"loss": self.layer(x).pow(2).mean()}

    return Squared()


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def all_reduce() -> float:
    """The sum of rank + 1 over all ranks, by a real collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(rank() + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def where() -> tuple[int, ...]:
    """What ``runtime`` says of this rank."""
    from distributor import runtime

    asked = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "attempt")
    return tuple(getattr(runtime, name)() for name in asked)


def take_turns(folder: str, name: str, fails: bool = False) -> list[str]:
    """Enters a block of ``runtime``; the files of others that were there by then."""
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    with getattr(runtime, name)():
        if fails and rank() == 0:
            raise Diverged(1)
        before = sorted(os.listdir(folder))
        Path(folder, f"node-{runtime.node_rank()}-rank-{runtime.local_rank()}").touch()
    dist.barrier()
    return before


def outlive(returned: str) -> bool:
    """Only joins the process group; whether rank 0 is still there a moment after it has returned."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank() == 0:
        Path(f"{returned}.new").write_text(str(os.getpid()))
        os.rename(f"{returned}.new", returned)
        return True
    while not os.path.exists(returned):
        time.sleep(0.001)
    pid, end = int(Path(returned).read_text()), time.monotonic() + 1.0
    while time.monotonic() < end and os.path.exists(f"/proc/{pid}"):
        time.sleep(0.001)
    return os.path.exists(f"/proc/{pid}")


def fail_on_rank_1(how: str) -> None:
    """Rank 1 fails while rank 0 waits in an all-reduce for it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if rank() == 1:
        if how == "raise":
            raise ValueError("learning rate must be positive")
        if how == "diverge":
            raise Diverged(17)
        if how == "exit":
            os._exit(3)
        if how == "sys.exit":
            raise SystemExit(3)
        os.kill(os.getpid(), getattr(signal, how))
    dist.all_reduce(torch.ones(1))


def fail_alike() -> None:
    """All ranks fail in one place, and none is stopped before it does."""
    import torch.distributed as dist

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    dist.barrier()
    print("careful", file=sys.stderr, flush=True)
    raise ValueError("learning rate must be positive")


def wait_for(path: str) -> int:
    """Says that it runs, then waits for a file."""
    print("waiting", flush=True)
    while not os.path.exists(path):
        time.sleep(0.01)
    return rank()


def train_on(ready: str, steps: int = 10**9) -> int:
    """Collectives on data that worker processes load, for so many steps; a file tells when all of it works."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    loader = DataLoader(TensorDataset(torch.ones(1000)), num_workers=1, persistent_workers=True, prefetch_factor=2)
    step = 0
    while step < steps:
        for (one,) in loader:
            dist.all_reduce(one)
            step += 1
            if step == 3:
                Path(ready, str(rank())).touch()
                print("training", flush=True)
            if step == steps:
                break
            time.sleep(0.01)  # two cores serve all ranks
    dist.destroy_process_group()
    return step


def recover(folder: str, how: str, failures: int = 1) -> tuple[int, float]:
    """Fails in the first attempts, in which each rank also leaves a child, and returns the attempt and a sum then."""
    import subprocess

    from distributor import runtime

    attempt = runtime.attempt()
    print(f"attempt {attempt} of rank {rank()}", flush=True)
    if attempt < failures:
        subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={})
        Path(folder, f"{attempt}-{rank()}").touch()
        while len(list(Path(folder).glob(f"{attempt}-*"))) < runtime.world_size():
            time.sleep(0.01)
        if rank() == 1:
            if how == "raise":
                raise Diverged(17)
            os.kill(os.getpid(), signal.SIGKILL)
    return attempt, all_reduce()


def wait_at_first() -> int:
    """Waits to be killed in the first attempt; the number of the attempt."""
    from distributor import runtime

    if runtime.attempt() == 0:
        time.sleep(600)
    return runtime.attempt()
