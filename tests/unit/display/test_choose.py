"""Which view fits the driver's output."""

from __future__ import annotations

import pytest
from screens import Screen

from distributor.display import choose
from distributor.display.plain import PlainView
from distributor.display.terminal import TerminalView


def test_the_view_fits_where_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose.choose(), PlainView)  # pytest captures stderr
    monkeypatch.setattr("sys.stderr", Screen())
    assert isinstance(choose.choose(), TerminalView)
    monkeypatch.setattr("sys.stderr", None)
    assert isinstance(choose.choose(), PlainView)
