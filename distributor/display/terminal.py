"""A live status below the output in a terminal. Rich renders it; ``console`` keeps it below the output.

Rich's own ``Live`` takes over ``sys.stdout`` and ``sys.stderr``, and re-wraps every line that ranks write.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from distributor.display.console import Console as Output
from distributor.display.screen import output, size_of
from distributor.display.snapshot import Snapshot, folded, reported, timed
from distributor.display.trials import MOST, TrialsSnapshot, heading, lines
from distributor.display.view import Packed, Shown
from distributor.text import escapes, notices
from distributor.text.wording import count, duration
from distributor.values.job import Status

_STYLES = {
    Status.WAITING: "yellow",
    Status.STARTING: "cyan",
    Status.RUNNING: "green",
    Status.STOPPING: "magenta",
}

_LINES = 4

_BESIDE = 6  # lines of a terminal that the table of a search leaves free


class TerminalView:
    """Shows a spinner, what the run is doing, and the last lines of ranks: each line once, at most :data:`_LINES`."""

    interval = 0.2
    announces = True

    def __init__(self) -> None:
        encoding = (getattr(sys.stderr, "encoding", None) or "").lower().replace("-", "")
        self._spinner = Spinner("dots" if encoding == "utf8" else "line")

    @contextmanager
    def packing(self, folder: str) -> Iterator[Packed]:
        columns = (TextColumn("packing {task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(folder, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
        """Return the status while a caller waits, and a line at the end, but for a failure: its error says why."""
        if snapshot.status in (Status.SUCCEEDED, Status.CANCELLED):
            ended = f"{snapshot.status.value} {'in' if snapshot.status is Status.SUCCEEDED else 'after'}"
            return Shown(notes=(f"run {snapshot.label} {ended} {duration(snapshot.seconds)}",))
        if snapshot.ended or not awaited:
            return Shown()
        return Shown(footer=rendered(self._render(snapshot)))

    def show_again(self, snapshot: Snapshot) -> bool:
        """Return ``False``: there is only one bottom of the terminal."""
        return False

    def _render(self, snapshot: Snapshot) -> RenderableType:
        style = _STYLES[snapshot.status]
        head = Text(no_wrap=True, overflow="ellipsis")
        spinner = self._spinner.render(time.monotonic())
        head.append(spinner.plain if isinstance(spinner, Text) else "*", style=style)
        head.append(f" {escapes.plain(timed(snapshot))}", style=f"bold {style}")
        facts = [f"run {snapshot.label}"]
        if snapshot.lasting < 1:  # otherwise, the line shows how long the current step of the start has lasted
            facts.insert(0, duration(snapshot.seconds))
        if snapshot.nodes and not snapshot.detail:  # a detail may already say how many nodes there are
            facts.insert(1, f"on {count(snapshot.nodes, 'node')}")
        head.append("  " + ", ".join(facts), style="dim")
        entries = folded(snapshot.lines, _LINES)
        lines = Table.grid(padding=(0, 2), pad_edge=False)
        lines.add_column(no_wrap=True, style="cyan", min_width=max((len(ranks) + 2 for ranks, _ in entries), default=0))
        lines.add_column(no_wrap=True, overflow="ellipsis")
        for ranks, line in entries:
            lines.add_row(f"  {ranks}", Text.from_ansi(line, no_wrap=True, overflow="ellipsis"))
        metrics = Text(f"  {escapes.plain(reported(snapshot))}", no_wrap=True, overflow="ellipsis")
        return Group(head, *([metrics] if metrics.plain.strip() else []), *([lines] if snapshot.lines else []))


class TerminalTrials:
    """Keeps the table below the output of the ranks."""

    interval = 0.25
    announces = False

    def __init__(self) -> None:
        self._console = Output(lambda rank: "")
        notices.show_on(self._console.note)

    def show(self, snapshot: TrialsSnapshot) -> None:
        self._console.footer(self._render(snapshot))

    def close(self, snapshot: TrialsSnapshot) -> None:
        self._console.footer(())
        self._console.note(heading(snapshot))
        notices.leave(self._console.note)
        self._console.close()

    def _render(self, snapshot: TrialsSnapshot) -> tuple[str, ...]:
        titles, rows = lines(snapshot, min(MOST, size_of(output(2)).lines - _BESIDE))
        table = Table.grid(padding=(0, 2), pad_edge=False)
        for title in titles:
            table.add_column(no_wrap=True, overflow="ellipsis", justify="left" if title in titles[:2] else "right")
        table.add_row(*(Text(escapes.plain(f"  {title}" if title == "trial" else title), "dim") for title in titles))
        for row in rows:
            style = "bold green" if row[0].endswith("*") else ""
            table.add_row(*(Text(("  " if not place else "") + cell, style) for place, cell in enumerate(row)))
        head = Text(heading(snapshot), "bold cyan", no_wrap=True, overflow="ellipsis")
        return rendered(Group(head, table))


def rendered(content: RenderableType) -> tuple[str, ...]:
    """Return the lines of what Rich renders, for a terminal of this width."""
    # One column less than the terminal has: a line that fills the last column wraps.
    console = Console(
        width=max(20, size_of(output(2)).columns - 1),
        force_terminal=True,
        no_color=bool(os.environ.get("NO_COLOR")),
        highlight=False,
        stderr=True,
    )
    with console.capture() as captured:
        console.print(content)
    return tuple(captured.get().splitlines())
