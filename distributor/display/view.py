"""The interface of views, which show a run in a terminal, in a notebook, or as occasional lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from distributor.display.snapshot import Snapshot

#: Is called with the number of bytes that are packed so far, and the total.
Packed = Callable[[int, int], None]


class Shown(NamedTuple):
    """Lines of a view: ``notes`` are printed among the ranks' lines, and ``footer`` is kept below all printed lines."""

    footer: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class View(Protocol):
    """Shows one run."""

    #: Seconds between two calls of ``show``.
    interval: float

    #: Whether lines must say where ranks run, and report a failure that no caller awaits. If not, the view shows both.
    announces: bool

    def packing(self, folder: str) -> AbstractContextManager[Packed]:
        """Show the packing of a project folder, before there is a run."""

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
        """Show the run; at last, when it has ended. While its end is ``awaited``, nothing else uses the terminal."""

    def show_again(self, snapshot: Snapshot) -> bool:
        """Show a run in progress in one more place, and keep both up to date; ``False`` if there is only one."""
