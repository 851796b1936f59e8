"""Code that reads Open MPI's variables only, as that for Horovod and Azure's MPI jobs does."""

from __future__ import annotations

import launched
import pytest
import watch
from sessions import LOCAL, Make

from distributor import TrainingError

pytestmark = pytest.mark.slow


@pytest.mark.ci
def test_ranks_meet_by_openmpis_variables(make: Make, mode: str, spread: dict[str, int]) -> None:
    run = make(2, launch="mpi-env", **spread).submit(launched.by_openmpis_variables)
    expected = [[3.0, 0, 2], [3.0, 1, 2]] if mode == LOCAL else [[3.0, 0, 1], [3.0, 0, 1]]
    assert run.results(watch.DEADLINE) == expected


def call_mpi() -> None:
    raise RuntimeError("MPI_Init failed")


def test_code_that_calls_mpi_gets_advice(make_local: Make) -> None:
    with pytest.raises(TrainingError, match="sets variables and starts no MPI"):
        make_local(2, launch="mpi-env").submit(call_mpi).result(watch.DEADLINE)
