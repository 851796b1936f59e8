"""The group check: ranks that train without the others are warned of, or an error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from sessions import Make

from distributor import GroupError, TrainingError

ALONE = "ranks 0-1 trained without the other ranks: there never was a process group of all 2 ranks"


def backward() -> Any:
    import torch

    model = torch.nn.Linear(2, 1)
    model(torch.ones(4, 2)).sum().backward()
    return model


def step() -> None:
    import torch

    torch.optim.SGD(backward().parameters(), 0.1).step()


def step_with_a_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    step()
    dist.barrier()  # or the other rank might still be connecting
    dist.destroy_process_group()


def group_after_a_first_step() -> None:
    import torch.distributed as dist

    step()
    dist.init_process_group("gloo")
    step()


def group_that_is_left_before_a_last_step() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()  # or the other rank might still be connecting
    dist.destroy_process_group()
    step()


def step_for_others_by_rpc() -> None:
    """One rank trains with what the other computes for it."""
    import torch.distributed.rpc as rpc

    from distributor import runtime

    rpc.init_rpc(f"rank-{runtime.rank()}", rank=runtime.rank(), world_size=2)
    if runtime.rank() == 0:
        rpc.rpc_sync("rank-1", abs, (-1,))
        step()
    rpc.shutdown()


def group_of_its_own() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    step()


def compute() -> float:
    import torch

    return float(torch.ones(2).sum())


@pytest.mark.slow
@pytest.mark.long_on_executors
@pytest.mark.parametrize(
    "training",
    [*(pytest.param(training, marks=pytest.mark.long_on_executors) for training in (backward, step)), group_of_its_own],
)
def test_ranks_that_train_alone_are_warned(make: Make, training: Any, caplog: pytest.LogCaptureFixture) -> None:
    make(2).run(training)
    (warning,) = [record.message for record in caplog.records if ALONE in record.message]
    assert "Call torch.distributed.init_process_group() before the model is made" in warning
    assert warning.endswith("require_group=True makes this an error")


@pytest.mark.long_on_executors
@pytest.mark.parametrize(
    ("ranks", "function", "require_group"),
    [
        (2, step_with_a_group, True),
        (2, step_for_others_by_rpc, True),
        *(
            pytest.param(ranks, function, required, marks=pytest.mark.long)
            for ranks, function, required in (
                (2, compute, True),
                (2, group_after_a_first_step, True),
                (2, group_that_is_left_before_a_last_step, True),
                (1, step, True),
                (2, step, False),
            )
        ),
    ],
)
@pytest.mark.slow
def test_no_warning_with_a_group_without_training_or_if_none_is_wanted(
    make: Make, ranks: int, function: Any, require_group: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make(ranks, require_group=require_group).run(function)
    assert "without the other" not in caplog.text


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_require_group_makes_it_an_error(make_local: Make, start_method: str) -> None:
    with pytest.raises(GroupError, match=r"^ranks? [01-]+ trained without the other ranks: .* of all 2 ranks"):
        make_local(2, require_group=True, start_method=start_method).run(step)


def exit_after_a_step() -> None:
    step()
    sys.exit()


@pytest.mark.long
def test_an_exit_with_0_after_training_alone_is_an_error(make_local: Make) -> None:
    with pytest.raises(GroupError):
        make_local(2, require_group=True).run(exit_after_a_step)


def hooks_that_change() -> int:
    """The group comes between the first backward pass and the first step, and another hook follows ours."""
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    calls: list[int] = []
    register_optimizer_step_post_hook(lambda *_: calls.append(1))
    model = backward()
    dist.init_process_group("gloo")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    optimizer.step()
    dist.destroy_process_group()
    return len(calls)


@pytest.mark.long
def test_other_hooks_are_left_alone(make_local: Make) -> None:
    assert make_local(2, require_group=True).submit(hooks_that_change).results() == [2, 2]


@pytest.mark.long
def test_a_failed_rank_gives_no_group_warning(make_local: Make, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        step()
        raise ValueError("learning rate")

    with pytest.raises(TrainingError, match="ValueError: learning rate"):
        make_local(2).run(fail)
    assert "without the other" not in caplog.text


@pytest.mark.slow
def test_a_script_that_trains_alone_is_warned(make_local: Make, tmp_path: Path, caplog: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "model(torch.ones(4, 2)).sum().backward()\n"
        "torch.optim.SGD(model.parameters(), 0.1).step()\n"
    )
    make_local(2).run(script)
    assert ALONE in caplog.text
