"""What a rank says of an exception that nobody caught."""

from __future__ import annotations

import sys
from typing import Any

from distributor.rank import process, result


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
