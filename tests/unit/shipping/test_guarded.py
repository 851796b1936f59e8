"""Calls that may never end."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest
import watch

from distributor.shipping.guarded import guarded


def calls() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distributor-guarded"]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_call_ends_as_it_would(error: BaseException) -> None:
    def fail() -> None:
        raise error

    assert guarded(lambda: 42, watch.DEADLINE) == 42
    with pytest.raises(type(error)) as caught:
        guarded(fail, watch.DEADLINE)
    assert caught.value is error


def test_a_call_that_goes_on_is_given_up_and_ends() -> None:
    def forever() -> None:
        while True:
            time.sleep(0.001)

    with pytest.raises(TimeoutError, match=r"no progress for 0\.2 s"):
        guarded(forever, 0.2)
    watch.until(lambda: not calls())


@pytest.mark.parametrize("how", ["progress", "imports"])
def test_a_call_that_gets_on_may_take_its_time(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def slow() -> int:
        for step in range(10):
            time.sleep(0.1)
            if how == "progress":
                steps.append(step)
            else:
                monkeypatch.setitem(sys.modules, f"no_such_module_{step}", ModuleType("empty"))
        return 42

    assert guarded(slow, 0.5, lambda: len(steps)) == 42


def test_without_another_thread_the_call_is_made_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert guarded(threading.get_ident, 1.0) == threading.get_ident()
