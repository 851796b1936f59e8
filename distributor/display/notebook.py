"""Shows a run as HTML: its live status, and its handle in a notebook.

Inline styles alone need no extension and no script, and stay in an exported notebook.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from distributor.display.snapshot import Snapshot, folded, reason, reported, timed
from distributor.display.trials import TrialsSnapshot, heading, lines
from distributor.display.view import Packed, Shown
from distributor.errors import TrainingError
from distributor.outcomes.timings import MEANING
from distributor.text import cells, escapes
from distributor.text.wording import count, duration, ranges, shortened, size
from distributor.values.job import Status

_COLOURS = {
    Status.WAITING: "#9a6700",
    Status.STARTING: "#0969da",
    Status.RUNNING: "#0969da",
    Status.STOPPING: "#8250df",
    Status.SUCCEEDED: "#1a7f37",
    Status.FAILED: "#cf222e",
    Status.CANCELLED: "#6e7781",
}

#: Safe for red-green colour blindness (Okabe and Ito, 2008). Training is green.
_PHASES = {
    "schedule": "#999999",
    "worker": "#56b4e9",
    "exchange": "#f0e442",
    "agent": "#cc79a7",
    "import": "#e69f00",
    "fork": "#d55e00",
    "call": "#0072b2",
    "function": "#009e73",
    "exit": "#444444",
    "collect": "#c0c0c0",
}

#: Phases that take less than this fraction of the whole are not drawn.
_LEAST = 0.005

#: Maximum number of characters to show of an error.
_LONGEST = 20_000

#: Maximum numbers of ranks' last lines, and of rows in the table of nodes.
_LINES = 8
_NODES = 32

_BOX = (
    "border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:.6em .9em;margin:.3em 0;"
    "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5"
)
_MONO = "font-family:ui-monospace,monospace;font-size:12px;white-space:pre-wrap;margin:.3em 0;text-align:left"
_CELL = "text-align:left;padding:.1em 1.2em .1em 0;border:none;background:none"
_FAINT = "opacity:.7"


class NotebookView:
    """Shows a run below the cell that started it, and keeps that output up to date."""

    interval = 0.5
    announces = False  # the view shows the placement itself

    def __init__(self) -> None:
        self._handle: Any = None
        self._html = ""
        self._cell: int | None = None

    @contextmanager
    def packing(self, folder: str) -> Iterator[Packed]:
        """Show a progress bar where the run's status will appear later."""

        def packed(done: int, total: int) -> None:
            part = round(100 * done / max(1, total))
            if f">{part} %<" not in self._html:  # update only when the percentage changes
                bar = f'<progress max="100" value="{part}"></progress> <span style="{_FAINT}">{part} %</span>'
                self._display(f'<div style="{_BOX}">packing <code>{escape(folder)}</code>, {size(total)} {bar}</div>')

        yield packed

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
        self._display(render(snapshot))
        return Shown()

    def show_again(self, snapshot: Snapshot) -> bool:
        """Show the run below the current cell too, unless that cell has started the run."""
        from IPython.display import HTML

        if self._handle is None:
            return False
        if self._cell != _cell():
            self._handle.display(HTML(render(snapshot)))
        return True

    def _display(self, html: str) -> None:
        from IPython.display import HTML, display

        if html == self._html:
            return
        self._html = html
        if self._handle is None:
            self._cell = _cell()
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))


def _cell() -> int | None:
    """Return the number of the cell that runs now; ``None`` outside IPython."""
    return getattr(cells.shell(), "execution_count", None)


def render(snapshot: Snapshot, *, unfolded: bool = False) -> str:
    """Return a run as HTML. ``unfolded`` opens its sections, also a traceback that the raised error shows."""
    parts = [_head(snapshot)]
    if snapshot.status is Status.FAILED:
        parts.append(f'<div style="margin-top:.3em">{_text(shortened(reason(snapshot), _LONGEST))}</div>')
    if newest := reported(snapshot):
        parts.append(_reported(snapshot, newest))
    if snapshot.ended and snapshot.timings:
        parts.append(_timings(snapshot))
    if snapshot.lines and not snapshot.ended:
        parts.append(_fold("last lines", _last_lines(snapshot), opened=True))
    if snapshot.placement is not None:
        parts.append(_fold("placement", _placement(snapshot), opened=unfolded))
    shown_elsewhere = snapshot.raised and not unfolded  # the error that is raised shows the traceback
    if isinstance(snapshot.error, TrainingError) and snapshot.error.traceback and not shown_elsewhere:
        title = f"traceback of rank {snapshot.error.rank} on {escape(snapshot.error.host or '?')}"
        trace = _text(shortened(snapshot.error.traceback, _LONGEST))
        parts.append(_fold(title, f'<pre style="{_MONO}">{trace}</pre>', opened=unfolded))
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def _text(text: str) -> str:
    """Return text for HTML: escaped, and without escape sequences of ranks."""
    return escape(escapes.plain(text))


def _head(snapshot: Snapshot) -> str:
    badge = (
        f'<span style="background:{_COLOURS[snapshot.status]};color:#fff;border-radius:4px;padding:.1em .6em;'
        f'font-weight:600">{snapshot.status.value}</span>'
    )
    facts = [count(snapshot.world_size, "rank"), duration(snapshot.seconds), f"run {snapshot.label}"]
    if snapshot.nodes:
        facts.insert(1, count(snapshot.nodes, "node"))
    words = "" if snapshot.ended else f" {_text(timed(snapshot))}"
    return (
        f"<div>{badge} <b>{escape(snapshot.title)}</b>{words} "
        f'<span style="{_FAINT};white-space:nowrap">{escape(" · ".join(facts))}</span></div>'
    )


def _reported(snapshot: Snapshot, text: str) -> str:
    progress, bar = snapshot.progress, ""
    if progress is not None and progress.total and not snapshot.ended:
        bar = f'<progress max="{progress.total}" value="{min(progress.step, progress.total)}"></progress> '
    return f'<div style="margin-top:.3em">{bar}{_text(text)}</div>'


def _fold(title: str, body: str, *, opened: bool) -> str:
    state = " open" if opened else ""
    return f'<details{state} style="margin-top:.3em"><summary style="cursor:pointer">{title}</summary>{body}</details>'


def _last_lines(snapshot: Snapshot) -> str:
    rows = "".join(
        f'<tr style="background:none"><td style="{_CELL};{_FAINT};white-space:nowrap">{escape(ranks)}</td>'
        f'<td style="{_CELL};font-family:ui-monospace,monospace">{_text(line)}</td></tr>'
        for ranks, line in folded(snapshot.lines, _LINES)
    )
    return f'<table style="border:none;border-collapse:collapse;font-size:12px">{rows}</table>'


def _placement(snapshot: Snapshot) -> str:
    assert snapshot.placement is not None
    nodes = snapshot.placement.nodes
    head = ["node", "host", "address", "ranks"] + (["GPUs"] if any(node.gpus for node in nodes) else [])
    rows = [
        [str(node.node_rank), node.host, node.address, ranges(node.ranks), ", ".join(node.gpus)][: len(head)]
        for node in nodes[:_NODES]
    ]
    if len(nodes) > _NODES:
        rows.append([f"and {len(nodes) - _NODES} more", *[""] * (len(head) - 1)])
    names = "".join(f'<th style="{_CELL};font-weight:600">{name}</th>' for name in head)
    body = "".join(
        '<tr style="background:none">' + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return f'<table style="border:none;border-collapse:collapse;font-size:12px"><tr>{names}</tr>{body}</table>'


def _timings(snapshot: Snapshot) -> str:
    """Return a bar of the run's phases as HTML, with their names below."""
    phases = {name: seconds for name, seconds in snapshot.timings.items() if name in _PHASES}
    whole = sum(phases.values()) or 1.0
    bars, names = [], []
    for name, seconds in phases.items():
        if seconds / whole < _LEAST:
            continue
        colour = _PHASES[name]
        label, title = f"{name} {duration(seconds)}", f' title="{MEANING[name]}"'
        bars.append(f'<div{title} style="width:{100 * seconds / whole:.2f}%;background:{colour}"></div>')
        square = f'<span style="color:{colour}">&#9632;</span>'
        names.append(f'<span{title} style="white-space:nowrap">{square} {label}</span>')
    return (
        '<div style="display:flex;height:.7em;border-radius:3px;overflow:hidden;margin:.5em 0 .2em;max-width:48em">'
        f'{"".join(bars)}</div><div style="font-size:12px">{" &nbsp; ".join(names)}</div>'
    )


class NotebookTrials:
    """Shows the table below the cell that searches, and keeps it up to date."""

    interval = 0.5
    announces = False

    def __init__(self) -> None:
        self._handle: Any = None
        self._html = ""

    def show(self, snapshot: TrialsSnapshot) -> None:
        from IPython.display import HTML, display

        html = render_trials(snapshot)
        if html == self._html:
            return
        self._html = html
        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))

    close = show


def render_trials(snapshot: TrialsSnapshot) -> str:
    """Return the search as HTML."""
    titles, rows = lines(snapshot)
    head = "".join(f'<th style="{_CELL}">{_text(title)}</th>' for title in titles)
    body = ""
    for row in rows:
        weight = ";font-weight:600" if row[0].endswith("*") else ""
        body += "<tr>" + "".join(f'<td style="{_CELL}{weight}">{escape(cell)}</td>' for cell in row) + "</tr>"
    return f'<div style="{_BOX}"><b>{escape(heading(snapshot))}</b><table><tr>{head}</tr>{body}</table></div>'
