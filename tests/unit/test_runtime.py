"""What a function may ask for, in a rank and outside of a run."""

from __future__ import annotations

import pytest

from distributor import ConfigurationError, runtime

VARIABLES = {
    "RANK": runtime.rank,
    "WORLD_SIZE": runtime.world_size,
    "LOCAL_RANK": runtime.local_rank,
    "LOCAL_WORLD_SIZE": runtime.local_world_size,
    "GROUP_RANK": runtime.node_rank,
    "TORCHELASTIC_RESTART_COUNT": runtime.attempt,
}


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_outside_of_a_run_there_is_one_rank() -> None:
    assert [ask() for ask in VARIABLES.values()] == [0, 1, 0, 1, 0, 0]
    entered = []
    for first in (runtime.rank0_first, runtime.local_rank0_first):
        with first():
            entered.append(first)
    assert len(entered) == 2


def test_a_rank_that_waits_says_that_the_connection_has_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def lost(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(runtime, "_connected", lost)
    with pytest.raises(
        RuntimeError, match=r"rank0_first: the connection to the other ranks has broken.*by peer"
    ) as told:
        with runtime.rank0_first():
            pytest.fail("the block was entered")
    assert type(told.value) is RuntimeError


@pytest.mark.parametrize("name", VARIABLES)
def test_torchruns_variables_decide(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    assert VARIABLES[name]() == 7


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_is_no_number_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "first")
    with pytest.raises(ConfigurationError, match=f"variable {name} must be a whole number, not 'first'"):
        VARIABLES[name]()


def test_the_steps_of_a_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.accumulation_steps(256, 32) == 8
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert runtime.accumulation_steps(256, 32) == 2


@pytest.mark.parametrize(("total", "each"), [(100, 32), (0, 32), (-32, 32), (32, 64)])
def test_a_global_batch_that_is_no_multiple_is_refused(total: int, each: int) -> None:
    told = rf"global_batch={total} must be a positive multiple of .* = {each} \* 1"
    with pytest.raises(ConfigurationError, match=told):
        runtime.accumulation_steps(total, each)


@pytest.mark.parametrize("each", [0, -32])
def test_a_batch_of_a_rank_below_1_is_refused(each: int) -> None:
    with pytest.raises(ConfigurationError, match=f"per_rank_batch={each} must be at least 1"):
        runtime.accumulation_steps(256, each)


@pytest.mark.parametrize("first", [runtime.rank0_first, runtime.local_rank0_first])
def test_ranks_without_a_process_group_cannot_wait(first, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigurationError, match=rf"{first.__name__} makes 2 ranks wait .*init_process_group\(\) first"
    ):
        with first():
            pass
