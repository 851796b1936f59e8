"""A terminal that tests can look at. Importing it needs pyte."""

from __future__ import annotations

import pyte


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
