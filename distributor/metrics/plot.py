"""Draws a run for notebooks: its metrics, their spread over the ranks, and where its time went."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from distributor.metrics.goodput import Goodput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from distributor.metrics.table import Metrics, Row

_COLUMNS = 3  # plots in a row of a figure

_MOST = 60  # plots of a figure: matplotlib takes seconds to lay them out, and draws no picture of a thousand


def draw(metrics: Metrics, goodput: Goodput | None = None) -> Figure:
    """Return a figure that a notebook displays, also in a kernel in which nobody has chosen a backend."""
    from matplotlib.figure import Figure

    with_time = goodput is not None and goodput.total > 0
    every = metrics.names
    names = every[:_MOST]
    columns = max(1, min(_COLUMNS, len(names)))
    lines = -(-len(names) // columns)
    heights = [3.0] * lines + [1.1] * with_time or [3.0]
    figure = Figure(figsize=(4.5 * max(columns, 2 if with_time else 1), sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for index, name in enumerate(names):
        _draw_metric(figure.add_subplot(grid[index // columns, index % columns]), name, metrics.rows)
    if with_time:
        assert goodput is not None
        _draw_time(figure.add_subplot(grid[-1, :]), goodput)
    if len(every) > _MOST:
        figure.suptitle(f"the first {_MOST} of {len(every):,} metrics")
    shown(figure)
    return figure


def shown(figure: Figure) -> Figure:
    """Let a notebook display a figure as the value of a cell, and return it."""
    setattr(figure, "_repr_png_", lambda: _png(figure))  # noqa: B010  # IPython asks the object itself
    return figure


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_metric(plot: Any, name: str, all_rows: Sequence[Row]) -> None:
    """Draw the line of the lowest rank, and a band from the smallest to the largest value of all ranks."""
    import numpy

    rows = [row for row in all_rows if name in row.values]
    stepped = all(row.step is not None for row in rows)
    began = min(row.time for row in all_rows)
    lines: dict[int, dict[float, float]] = {}
    for row in rows:  # a step that was done again has its newest value
        at = row.step if stepped and row.step is not None else row.time - began
        lines.setdefault(row.rank, {})[at] = row.values[name]
    points = {rank: numpy.array(sorted(line.items()), dtype=float).T for rank, line in sorted(lines.items())}
    lowest, (x, y) = next(iter(points.items()))
    if len(points) > 1:
        others = [numpy.interp(x, at, values, left=numpy.nan, right=numpy.nan) for at, values in points.values()]
        low, high = numpy.fmin.reduce(others), numpy.fmax.reduce(others)
        plot.fill_between(x, low, high, alpha=0.25, linewidth=0, label=f"{len(points)} ranks")
    plot.plot(x, y, label=f"rank {lowest}", marker="." if len(x) == 1 else None)
    plot.set_title(name, parse_math=False)
    plot.set_xlabel("step" if stepped else "seconds")
    if len(points) > 1:
        plot.legend()


def _draw_time(plot: Any, goodput: Goodput) -> None:
    left = 0.0
    for name, seconds in _spent(goodput):
        plot.barh(0, seconds, left=left, label=f"{name} {seconds:.1f} s")
        left += seconds
    plot.set_yticks([])
    plot.set_xlim(0, left)
    plot.set_xlabel("seconds")
    plot.set_title(f"{100 * goodput.share:.0f} % of the time in training")
    plot.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")


def _spent(goodput: Goodput) -> Iterator[tuple[str, float]]:
    for each in fields(goodput):
        if (seconds := getattr(goodput, each.name)) >= 0.005 * goodput.total:
            yield each.name, seconds
