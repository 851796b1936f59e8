"""Large arrays and tensors that a function captures or is given: ranks share one file, their changes are their own."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from captured import MIB, assert_own_copies, numbers
from sessions import Make, Sessions

from distributor import PayloadError, TorchDistributor, runtime
from distributor.api import forewarn
from distributor.machine import limits


@pytest.mark.long_on_executors
def test_what_ranks_write_is_their_own(make: Make) -> None:
    assert_own_copies(make)


@pytest.mark.long
def test_ranks_that_are_new_processes_map_it_too(make_local: Make) -> None:
    assert_own_copies(lambda processes: make_local(processes, start_method="spawn"))


@pytest.mark.long
def test_it_comes_from_the_drivers_jvm(one_jvm: Any) -> None:
    assert_own_copies(lambda processes: TorchDistributor(processes, False, False))


@pytest.mark.spark
@pytest.mark.long
def test_it_comes_encrypted(sessions: Sessions) -> None:
    sessions.get("local[2]", **{"spark.io.encryption.enabled": "true"})
    array = numbers()
    assert TorchDistributor(1, False, False).run(lambda: int(array.sum())) == int(array.sum())


@pytest.mark.slow
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


@pytest.mark.long_on_executors
def test_an_attempt_finds_what_the_driver_has_pickled(make: Make) -> None:
    array = numbers()

    def train() -> int:
        total = int(array.sum())
        array[:] = 0
        if runtime.attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return total

    assert make(1, max_restarts=1).run(train) == int(array.sum())
