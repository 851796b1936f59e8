"""Process groups one after another in one function or script, which torch alone confuses."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from sessions import Make

from distributor import TrainingError

ROUNDS = 6


def total(number: int, **given: int) -> float:
    """A sum over the ranks of a group that is joined and left."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=90), **given)
    value = torch.tensor([float(dist.get_rank() + number)])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def totals() -> list[float]:
    return [total(number) for number in range(ROUNDS)]


def expected(ranks: int) -> list[float]:
    return [float(ranks * (ranks - 1) / 2 + ranks * number) for number in range(ROUNDS)]


def test_a_function_joins_one_group_after_another(make: Make) -> None:
    assert make(2).submit(totals).results(timeout=300) == [expected(2)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "start_method"), [(8, "fork"), pytest.param(2, "spawn", marks=pytest.mark.long)])
def test_a_script_joins_one_group_after_another(
    ranks: int, start_method: str, make_local: Make, tmp_path: Path
) -> None:
    """Also where ranks are new processes, which have not imported torch."""
    script = tmp_path / "train.py"
    body = f"ROUNDS = {ROUNDS}\n{inspect.getsource(total)}{inspect.getsource(totals)}"
    written = "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(json.dumps(totals()))"
    script.write_text(f"import json, os, sys\n{body}{written}")
    make_local(ranks, start_method=start_method).run(script, tmp_path)
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(ranks)] == [expected(ranks)] * ranks


def some_ranks_between() -> list[float]:
    """Groups of all, of the first two, and of all ranks."""
    from distributor import runtime

    rank, first = runtime.rank(), total(0)
    return [first, *([total(0, rank=rank, world_size=2)] if rank < 2 else []), total(1)]


def test_a_group_of_some_ranks_is_apart_from_those_of_all(make_local: Make) -> None:
    assert make_local(3).submit(some_ranks_between).results(timeout=300) == [[3.0, 1.0, 6.0]] * 2 + [[3.0, 6.0]]


def join_as_in_a_tutorial() -> None:
    import os

    import torch.distributed as dist

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "1"  # where nobody may listen but root
    dist.init_process_group("gloo")


def test_code_that_sets_its_own_address_is_told_to_leave_it_out(make_local: Make) -> None:
    with pytest.raises(TrainingError, match="Leave out the lines that set MASTER_ADDR") as caught:
        make_local(2).run(join_as_in_a_tutorial)
    assert "c10d::" not in str(caught.value)  # none of torch's C++ frames
