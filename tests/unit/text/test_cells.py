"""Frames of notebook cells in tracebacks."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributor.text import cells

TRACE = """Traceback (most recent call last):
  File "/work/train.py", line 7, in train
    step()
  File "/tmp/ipykernel_1/22.py", line 2, in step
ValueError: learning rate must be positive"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/22.py", (9, None, ["x = 1\n", "    raise x\n"], "22.py"))


def test_without_a_notebook_nothing_changes() -> None:
    assert cells.readable(TRACE) == TRACE


def test_the_line_of_a_cell_is_added(cell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert cells.readable(TRACE) == TRACE.replace("in step\n", "in step\n    raise x\n")


def test_a_cell_has_its_own_name(cell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SimpleNamespace(
        format_code_name=lambda path: ("Cell", "In[5]") if "ipykernel" in path else ("File", path)
    )
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    told = TRACE.replace('File "/tmp/ipykernel_1/22.py", line 2, in step', "Cell In[5], line 2, in step\n    raise x")
    assert cells.readable(TRACE) == told
    assert cells.readable(told) == told


def test_a_line_that_is_there_is_not_added_again(cell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    whole = TRACE.replace("in step\n", "in step\n    raise x\n")
    assert cells.readable(whole) == whole


def test_the_line_of_a_file_of_the_driver_is_added(tmp_path: Path) -> None:
    """Executors lack the file of a function that was sent to them."""
    (tmp_path / "train.py").write_text("def train():\n    step()\n")
    trace = TRACE.replace("/work/train.py", str(tmp_path / "train.py")).replace("line 7", "line 2")
    assert cells.readable(trace.replace("    step()\n", "")) == trace
    assert cells.readable(trace.replace("line 2", "line 9")) == trace.replace("line 2", "line 9")
    stack = f'Current thread 0x1 (most recent call first):\n  File "{tmp_path}/train.py", line 2 in train'
    assert cells.readable(stack) == stack
