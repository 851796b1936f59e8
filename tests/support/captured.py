"""A function with large arrays and tensors, into which each rank writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import watch

from distributor import TorchDistributor, runtime

MIB = 1 << 20


def numbers(mebibytes: int = 16) -> numpy.ndarray:
    return numpy.arange(mebibytes * MIB // 8, dtype=numpy.int64)


def capturing() -> Any:
    array, text = numbers(), bytes(range(256)) * (4 * MIB // 256)
    fixed = numbers(2)
    fixed.flags.writeable = False
    model = torch.nn.Linear(1024, 1024)
    torch.nn.init.constant_(model.weight, 0.5)

    def train(given: numpy.ndarray, *, tensor: torch.Tensor) -> tuple[Any, ...]:
        dist.init_process_group("gloo")
        before = int(array.sum()), int(given.sum()), float(model.weight.sum()), int(tensor.sum()), hash(text)
        dist.barrier()
        for changed in (array, given, tensor):
            changed[:] = runtime.rank()
        model.weight.data.fill_(runtime.rank())
        dist.barrier()  # both have written
        after = int(array.sum()), int(given.sum()), float(model.weight.sum()), int(tensor.sum())
        dist.destroy_process_group()
        return before, after, fixed.flags.writeable, files_mapped()

    return train


def files_mapped() -> int:
    """How many bytes of the call's file this process maps."""
    size = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if " rw-p " in line and int(fields[4]) and ("/call" in line or "(deleted)" in line) and "/dev/shm" not in line:
            begin, end = (int(number, 16) for number in fields[0].split("-"))
            size += end - begin
    return size


def assert_own_copies(make: Callable[[int], TorchDistributor]) -> None:
    """Two ranks find what the driver has captured, and change it, each for itself."""
    given, tensor = numbers(2), torch.arange(MIB)
    results = make(2).submit(capturing(), given, tensor=tensor).results(timeout=watch.DEADLINE)
    for rank, (before, after, writeable, mapped) in enumerate(results):
        array = numbers()
        assert before[:4] == (int(array.sum()), int(given.sum()), 0.5 * MIB, int(tensor.sum()))
        assert after == (rank * array.size, rank * given.size, float(rank * MIB), rank * MIB)
        assert not writeable
        assert mapped > 32 * MIB
    assert int(given[-1]) == given.size - 1  # the driver's own has not changed
