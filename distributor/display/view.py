"""What a run shows of itself while it goes: in a terminal, in a notebook, or as occasional lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from distributor.display.snapshot import Snapshot

#: Is told how many bytes of how many have been packed.
Packed = Callable[[int, int], None]


class Shown(NamedTuple):
    """What a view wants to have in the log: ``footer`` stays below it for now, ``notes`` are lines of it."""

    footer: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class View(Protocol):
    """Shows one run."""

    #: Seconds between looks at the run.
    interval: float

    #: Whether the log is to say who runs where on a cluster.
    announces: bool

    def packing(self, folder: str) -> AbstractContextManager[Packed]:
        """While a project folder is packed, before there is a run."""

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
        """Shows a moment; the last one is that of a run that has ended.

        Args:
            snapshot: of the run.
            awaited: whether somebody waits for its end, so that the terminal is not used otherwise.
        """

    def show_again(self, snapshot: Snapshot) -> bool:
        """Shows a run that goes on in one more place, and keeps that up to date; ``False`` where it cannot."""
