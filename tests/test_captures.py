"""Large arrays and tensors that a function captures or is given: ranks share one file, their changes are their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import watch
from sessions import Make, Sessions

from distributor import PayloadError, TorchDistributor, runtime
from distributor.api import forewarn
from distributor.machine import limits

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


def assert_own_copies(make: Make) -> None:
    given, tensor = numbers(2), torch.arange(MIB)
    results = make(2).submit(capturing(), given, tensor=tensor).results(timeout=watch.DEADLINE)
    for rank, (before, after, writeable, mapped) in enumerate(results):
        array = numbers()
        assert before[:4] == (int(array.sum()), int(given.sum()), 0.5 * MIB, int(tensor.sum()))
        assert after == (rank * array.size, rank * given.size, float(rank * MIB), rank * MIB)
        assert not writeable
        assert mapped > 32 * MIB
    assert int(given[-1]) == given.size - 1  # the driver's own has not changed


def test_what_ranks_write_is_their_own(make: Make) -> None:
    assert_own_copies(make)


def test_ranks_that_are_new_processes_map_it_too(make_local: Make) -> None:
    assert_own_copies(lambda processes: make_local(processes, start_method="spawn"))


def test_it_comes_from_the_drivers_jvm(one_jvm: Any) -> None:
    assert_own_copies(lambda processes: TorchDistributor(processes, False, False))


@pytest.mark.spark
def test_it_comes_encrypted(sessions: Sessions) -> None:
    sessions.get("local[2]", **{"spark.io.encryption.enabled": "true"})
    array = numbers()
    assert TorchDistributor(1, False, False).run(lambda: int(array.sum())) == int(array.sum())


def test_what_is_large_is_named_before_the_run(
    make_local: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    array, other = numbers(8), numbers(4)
    distributor = make_local(1, progress=False)
    assert distributor.run(lambda given: len(given) + len(array), other) == array.size + other.size
    assert not caplog.messages
    monkeypatch.setattr(forewarn, "LARGE_CALL", 8 * MIB)
    distributor.run(lambda given: len(given) + len(array), other)
    (line,) = caplog.messages
    assert "lambda> has 12 MiB of data with it, mainly the variable 'array' that it uses (8.0 MiB), which" in line
    assert line.endswith("save the data to a file that all nodes can read, and load it inside the function")


def test_what_the_machine_cannot_hold_is_an_error_at_once(make_local: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    array = numbers(8)
    monkeypatch.setattr(limits, "free_memory", lambda: 8 * MIB)
    with pytest.raises(
        PayloadError, match=r"8.0 MiB of data with it, but this machine has only 8.0 MiB of free memory"
    ):
        make_local(1).submit(lambda: len(array))


def test_an_attempt_finds_what_the_driver_has_pickled(make: Make) -> None:
    array = numbers()

    def train() -> int:
        total = int(array.sum())
        array[:] = 0
        if runtime.attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return total

    assert make(1, max_restarts=1).run(train) == int(array.sum())
