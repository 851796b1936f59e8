"""Code that starts processes of its own with torch is told that the run has started its ranks already."""

from __future__ import annotations

import pytest
from sessions import Make

NOTE = "[distributor] the code starts processes with torch.multiprocessing in each rank."


def twice() -> None:
    import torch.multiprocessing as mp

    mp.spawn(print, nprocs=1)
    mp.spawn(print, nprocs=1)


def by_another_name() -> None:
    from torch.multiprocessing import start_processes

    start_processes(print, nprocs=1, start_method="fork")


def without_torchs_help() -> None:
    import multiprocessing

    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()


@pytest.mark.parametrize(  # torch has been imported, or not
    "start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("code", [twice, pytest.param(by_another_name, marks=pytest.mark.long)])
@pytest.mark.long
def test_torch_multiprocessing_in_a_rank_is_warned_of_once(
    make_local: Make, code: object, start_method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make_local(2, start_method=start_method).run(code)
    output = capfd.readouterr()
    assert (output.out + output.err).count(NOTE) == 1


def test_other_processes_are_not_warned_of(make_local: Make, capfd: pytest.CaptureFixture[str]) -> None:
    make_local(2).run(without_torchs_help)
    output = capfd.readouterr()
    assert NOTE not in output.out + output.err
