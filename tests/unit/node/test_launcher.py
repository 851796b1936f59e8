"""What a spare does while it waits for the next attempt's order."""

from __future__ import annotations

import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributor.machine import forks
from distributor.node import launcher
from distributor.rank import slow_import

Wait = Callable[..., None]


@pytest.fixture
def wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wait]:
    """Waits as a spare does, of whose ranks those with 1 have imported a module; ``looks``: whether the order is there.

    A further look is an error.
    """
    (tmp_path / "takes_long.py").touch()
    monkeypatch.setattr(slow_import, "_MODULE", "takes_long")
    monkeypatch.setattr(forks, "what_breaks", lambda: None)  # pytest-xdist has threads
    before = dict(os.environ)
    agent, line = socket.socketpair()

    def waits(*imported: int, looks: list[bool]) -> None:
        memory = mmap.mmap(-1, len(imported))
        memory[:] = bytes(imported)
        plan = SimpleNamespace(rank_env=({},))
        order: Any = SimpleNamespace(imported=memory, environ={}, plan=plan, cwd=None, sys_path=[str(tmp_path)])
        monkeypatch.setattr(launcher, "readable", lambda *_: looks.pop(0))
        launcher._import_early(order, line)
        assert looks == []

    with agent, line:
        yield waits
    sys.modules.pop("takes_long", None)
    os.environ.clear()
    os.environ.update(before)


def test_a_spare_imports_what_all_ranks_have_and_then_looks_no_more(wait: Wait) -> None:
    wait(1, 1, looks=[False])
    assert "takes_long" in sys.modules
    wait(0, 0, looks=[])  # in a later attempt, no rank notes it


@pytest.mark.parametrize("imported", [(0, 0), (1, 0), (1, 1)])
def test_an_order_comes_before_an_import(wait: Wait, imported: tuple[int, int]) -> None:
    wait(*imported, looks=[False, True] if 0 in imported else [True])
    assert "takes_long" not in sys.modules


def test_a_spare_that_must_not_be_forked_ends(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "what_breaks", lambda: "starts threads")
    with pytest.raises(RuntimeError, match="cannot fork the next attempt's ranks: an import starts threads"):
        wait(1, looks=[False])
