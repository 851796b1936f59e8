"""What a rank says of an exception that nobody caught."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributor.channel import rank_slots
from distributor.channel.rank_slots import RankSlots, Slot
from distributor.rank import process, result
from distributor.values import layout


def test_a_fork_of_a_rank_does_not_return_its_value(tmp_path: Path) -> None:
    """Neither in memory nor in the file of a large one."""
    order: Any = SimpleNamespace(host="host-a", folder=str(tmp_path), collect_all=False)
    order.plan = SimpleNamespace(node=SimpleNamespace(first_rank=0))
    slots = RankSlots(1)
    told = result.RankResult(order, 0, Slot(slots.descriptor, 0))
    told.returned(b"r" * (2 << 20))
    child = os.fork()
    if child == 0:
        try:
            told.returned(b"f" * (3 << 20))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    slots.close()
    assert pickle.loads(layout.value(str(tmp_path), 0).read_bytes()) == b"r" * (2 << 20)


def test_frames_without_end_leave_room_for_what_was_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a deep recursion, in an exception whose own code never ends."""
    monkeypatch.setattr(result, "printed", lambda error: 1 / 0)
    order: Any = SimpleNamespace(host="host-a", folder=str(tmp_path), plan=SimpleNamespace())
    order.plan.node = SimpleNamespace(first_rank=0)
    slots = RankSlots(1)
    name = "deep" * 2000
    deep = f"def {name}(left): {name}_(left - 1) if left else 1 / 0\ndef {name}_(left): {name}(left)\n{name}(350)"
    result.RankResult(order, 0, Slot(slots.descriptor, 0)).raised(raised(deep))
    said = rank_slots.read(slots.descriptor, 0)
    slots.close()
    assert said is not None
    assert pickle.loads(said).outcome.failure.kind == "ZeroDivisionError"


def raised(source: str) -> Exception:
    try:
        exec(compile(source, "train.py", "exec"), {})
    except Exception as error:
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next)
    raise AssertionError("nothing was raised")


def test_a_traceback_is_as_python_prints_it() -> None:
    told = result.printed(raised("def train():\n    1 / 0\n\ntrain()"))
    assert told.splitlines() == [
        "Traceback (most recent call last):",
        '  File "train.py", line 4, in <module>',
        '  File "train.py", line 2, in train',
        "ZeroDivisionError: division by zero",
    ]


def test_what_may_have_been_meant_is_told() -> None:
    assert result.printed(raised("prin")).endswith("NameError: name 'prin' is not defined. Did you mean: 'print'?\n")


def test_a_hook_is_found_below_those_of_torch() -> None:
    def wrapped(old_hook: Any) -> Any:
        def _distributed_excepthook(*args: Any) -> None:  # as in torch.distributed.init_process_group
            old_hook(*args)

        return _distributed_excepthook

    def own(*args: Any) -> None:
        pass

    assert process._without_torch(wrapped(wrapped(sys.__excepthook__))) is sys.__excepthook__
    assert process._without_torch(wrapped(own)) is own
    assert process._without_torch(own) is own
