"""Which view fits the driver's output."""

from __future__ import annotations

import pyte
import pytest

from distributor.display import choose
from distributor.display.plain import PlainView
from distributor.display.terminal import TerminalView


class Screen:
    """A terminal as its user sees it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.screen = pyte.Screen(60, 12)
        self.stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def flush(self) -> None:
        pass

    def lines(self) -> list[str]:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip("\n").split("\n")


def test_the_view_fits_where_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose.choose(), PlainView)  # pytest captures stderr
    monkeypatch.setattr("sys.stderr", Screen())
    assert isinstance(choose.choose(), TerminalView)
    monkeypatch.setattr("sys.stderr", None)
    assert isinstance(choose.choose(), PlainView)
