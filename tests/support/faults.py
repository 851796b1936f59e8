"""Training functions that break what a rank needs to tell how it ends."""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any


def no_file_may_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def no_descriptors() -> None:
    os.closerange(3, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def another_root() -> None:
    empty = Path(node_folder(), "empty")
    empty.mkdir(exist_ok=True)
    os.chroot(empty)


def no_folder() -> None:
    shutil.rmtree(node_folder(), ignore_errors=True)


def another_clock() -> None:
    time.time = time.monotonic = lambda: "noon"  # type: ignore[assignment, return-value]


BREAKS = {
    function.__name__: function
    for function in (no_file_may_grow, no_descriptors, another_root, no_folder, another_clock)
}


def node_folder() -> str:
    """The node's folder, where the rank's output goes."""
    return os.path.dirname(os.readlink("/proc/self/fd/1"))


def fill(folder: str) -> None:
    """Leaves no room in the file system of a folder."""
    with open(Path(folder, "ballast"), "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def break_then(what: str, then: str) -> str:
    """Breaks something once all ranks are there: what they share breaks for all."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    BREAKS[what]()
    if then == "raise" and os.environ["RANK"] == "1":
        raise ValueError("the learning rate must be positive")
    return os.environ["RANK"]


def fill_then(then: str, value: int = 0) -> Any:
    if os.environ["LOCAL_RANK"] == "0":
        fill(node_folder())
    if then == "raise":
        raise ValueError("the learning rate must be positive")
    if then == "print":
        for _ in range(100):
            print("loss " * 1000)
    if then == "exit":
        os._exit(3)
    return bytes(value)


def raise_at_length(size: int) -> None:
    raise ValueError("x" * size)


def fail_after(path: str, failing: int = 1) -> None:
    """One rank fails once there is a file; the others wait."""
    Path(f"{path}.{os.environ['RANK']}").touch()
    while os.environ["RANK"] != str(failing) or not Path(path).exists():
        time.sleep(0.01)
    raise ValueError("while the nodes were apart")


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def give(size: int) -> bytes:
    """Returns so many bytes, each of which is the rank."""
    return bytes([int(os.environ["RANK"])]) * size
