"""The interface of views, which show a run in a terminal, in a notebook, or as occasional lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from distributor.display.snapshot import Snapshot

#: A function that is called with the number of bytes that are packed so far, and the total.
Packed = Callable[[int, int], None]


class Shown(NamedTuple):
    """Lines of a view: ``notes`` are printed among the ranks' lines, and ``footer`` is kept below all printed lines."""

    footer: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class View(Protocol):
    """Shows one run."""

    #: Number of seconds between two calls of ``show``.
    interval: float

    #: Whether printed lines must say where ranks run on a cluster, and report the failure of a run whose result no
    #: caller awaits. If not, the view shows both.
    announces: bool

    def packing(self, folder: str) -> AbstractContextManager[Packed]:
        """Return a context manager that shows the packing of a project folder, before there is a run."""

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
        """Show the run at one moment. The last call is for a run that has ended.

        Args:
            snapshot: the state of the run.
            awaited: whether a caller waits for the end of the run. If so, nothing else uses the terminal.
        """

    def show_again(self, snapshot: Snapshot) -> bool:
        """Show a run in progress in one more place, and keep both places up to date.

        Return ``False`` if the view can show a run in one place only.
        """
