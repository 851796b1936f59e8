"""The live table of a search in words, and the interface of its views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from distributor.display.screen import unmoving
from distributor.text import escapes
from distributor.text.wording import count, duration

MOST = 12  # trials in a terminal and a notebook

_PARAMETERS = 6  # of a trial, in its row

_LONGEST = 24  # characters of a parameter's value


@dataclass(frozen=True)
class TrialRow:
    """One trial of a table."""

    number: int
    state: str
    params: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    value: float | None = None
    is_live: bool = False


@dataclass(frozen=True)
class TrialsSnapshot:
    """The state of a search at one moment. ``best`` is the number of the best trial."""

    name: str
    metric: str
    wanted: float
    seconds: float = 0.0
    rows: tuple[TrialRow, ...] = ()
    best: int | None = None


def chosen(snapshot: TrialsSnapshot, most: int) -> tuple[TrialRow, ...]:
    """Return at most ``most`` trials by number: the best, those that run, and the last that have ended.

    >>> rows = tuple(TrialRow(number, "complete") for number in range(5))
    >>> [row.number for row in chosen(TrialsSnapshot("s", "loss", 9, rows=rows, best=1), 3)]
    [1, 3, 4]
    """
    by_weight = sorted(snapshot.rows, key=lambda row: (row.number != snapshot.best, not row.is_live, -row.number))
    return tuple(sorted(by_weight[: max(1, most)], key=lambda row: row.number))


def heading(snapshot: TrialsSnapshot) -> str:
    """Describe the search in one line.

    >>> heading(TrialsSnapshot("digits", "loss", 9, 4.0, (TrialRow(0, "complete", value=0.5),), 0))
    'search digits: 1 of 9 trials ended, 4.0 s; best loss 0.5 of trial 0'
    """
    live = sum(row.is_live for row in snapshot.rows)
    text = f"search {snapshot.name}: {len(snapshot.rows) - live} of {count(int(snapshot.wanted), 'trial')} ended"
    text += f", {live} running" if live else ""
    text += f", {duration(snapshot.seconds)}"
    best = next((row for row in snapshot.rows if row.number == snapshot.best), None)
    if best is not None and best.value is not None:
        text += f"; best {snapshot.metric} {best.value:.6g} of trial {best.number}"
    return escapes.plain(text)


def lines(snapshot: TrialsSnapshot, most: int = MOST) -> tuple[list[str], list[list[str]]]:
    """Return the titles of the columns, and the cells of the trials that are shown. The best one has a star."""
    rows = chosen(snapshot, most)
    names = list(dict.fromkeys(name for row in snapshot.rows for name in row.params))[:_PARAMETERS]
    return ["trial", "state", *names, "step", snapshot.metric], [
        [
            f"{row.number}{' *' if row.number == snapshot.best else ''}",
            row.state,
            *(_shown(row.params.get(name, "")) for name in names),
            "" if row.step is None else str(row.step),
            "" if row.value is None else f"{row.value:.6g}",
        ]
        for row in rows
    ]


def _shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else unmoving(str(value))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


class TrialsView(Protocol):
    """Shows a search."""

    #: Seconds between two calls of ``show``.
    interval: float

    #: Whether the ends of trials must be shown as lines, since there is no table.
    announces: bool

    def show(self, snapshot: TrialsSnapshot) -> None:
        """Show the search as it is now."""

    def close(self, snapshot: TrialsSnapshot) -> None:
        """Show the search as it has ended."""
