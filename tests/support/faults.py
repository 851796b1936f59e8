"""Training functions that break what a rank needs to tell how it ends."""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any


class NeverEnds(Exception):
    """An exception whose text never comes."""

    def __str__(self) -> str:
        while True:
            time.sleep(1)


class NeverReduced(Exception):
    """An exception that is never pickled."""

    def __reduce__(self) -> Any:
        while True:
            time.sleep(1)


class NeverPickled:
    """A value that is never pickled."""

    def __reduce__(self) -> Any:
        while True:
            time.sleep(1)


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


def raise_what_never_ends(what: str) -> None:
    from distributor.rank import result

    result.PATIENCE = 0.5
    if what == "text":
        raise NeverEnds
    raise NeverReduced("step 17")


def return_what_never_ends() -> Any:
    from distributor.rank import result

    result.VALUE_PATIENCE = 0.5
    return NeverPickled()


def fork_and(then: str, go: str) -> str:
    """A child that ends after its parent has returned: its end is not the rank's."""
    child = os.fork()
    if child == 0:
        while not Path(go).exists():
            time.sleep(0.01)
        if then == "raise":
            raise ValueError("raised in a fork")
        if then == "exit":
            sys.exit("exited in a fork")
        return "of a fork"

    def outlive() -> None:
        Path(go).touch()
        os.waitpid(child, 0)

    atexit.register(outlive)
    return "of the rank"


def fail_first_or_when_stopped(started: str) -> None:
    """Rank 0 fails; rank 1, whose clock is an hour behind, fails because it is told to stop."""
    if os.environ["RANK"] == "0":
        while not Path(started).exists():
            time.sleep(0.01)
        raise ValueError("the true reason")
    real = time.time
    time.time = lambda: real() - 3600

    def stopped(*_: Any) -> None:
        raise RuntimeError("told to stop")

    signal.signal(signal.SIGTERM, stopped)
    Path(started).touch()
    time.sleep(300)


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


def leave_while_others(wait: str, code: int = 0) -> int:
    """The last rank leaves by os._exit in the first attempt; the others wait for it, or only sleep."""
    from distributor import runtime

    if runtime.attempt() == 0:
        if runtime.rank() == runtime.world_size() - 1:
            os._exit(code)
        if wait == "load":
            runtime.load_checkpoint({"step": 0})
        elif wait == "save":
            runtime.save_checkpoint({"step": 1}, 1, wait=True)
        elif wait == "folder":
            with runtime.checkpoint_folder(1):
                pass
        time.sleep(600)
    return runtime.attempt()


def end_late(how: str) -> None:
    """Rank 1 closes its group long before it is seen to have failed; the others lose their connections to it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        if how == "_exit":  # without a word
            time.sleep(0.4)
            os._exit(3)
        atexit.register(time.sleep, 1)
        sys.exit(3)
    dist.all_reduce(torch.ones(1))
