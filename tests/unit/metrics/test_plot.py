"""What a figure of metrics shows; a notebook's kernel draws it in ``tests/test_notebook_view.py``."""

from __future__ import annotations

import pytest

from distributor.metrics.goodput import Goodput
from distributor.metrics.plot import draw
from distributor.metrics.table import Metrics, Row

pytest.importorskip("matplotlib")

FOUR_RANKS = Metrics(
    tuple(Row(0, step, 10.0 * step, rank, {"loss": 10.0 * step + rank}) for step in range(3) for rank in range(4))
)


def test_a_line_shows_rank_0_and_a_band_the_range_over_all_ranks() -> None:
    (plot,) = draw(FOUR_RANKS).axes
    assert [line.get_xydata().tolist() for line in plot.lines] == [[[0, 0], [1, 10], [2, 20]]]
    (band,) = plot.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices.tolist()} >= {(1, 10), (1, 13), (2, 23)}
    assert [text.get_text() for text in plot.get_legend().get_texts()] == ["4 ranks", "rank 0"]


def test_a_step_that_was_done_again_shows_its_newest_value() -> None:
    rows = [Row(0, 1, 1.0, 0, {"loss": 3.0}), Row(0, 2, 2.0, 0, {"loss": 2.0}), Row(1, 2, 9.0, 0, {"loss": 1.0})]
    (plot,) = draw(Metrics(tuple(rows))).axes
    assert plot.lines[0].get_xydata().tolist() == [[1, 3], [2, 1]]


def test_a_name_is_shown_as_it_is() -> None:
    figure = draw(Metrics((Row(0, 1, 1.0, 0, {"$\\frac$": 0.5}),)))
    assert figure.axes[0].get_title() == "$\\frac$"
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_names_without_end_make_a_figure_that_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.metrics.plot._MOST", 2)
    figure = draw(Metrics((Row(0, 1, 1.0, 0, {"a": 1.0, "b": 2.0, "c": 3.0}),)))
    assert [plot.get_title() for plot in figure.axes] == ["a", "b"]
    assert figure.get_suptitle() == "the first 2 of 3 metrics"


def test_a_bar_shows_where_the_time_went() -> None:
    figure = draw(FOUR_RANKS, Goodput(training=90.0, starting=8.0, saving=2.0, loading=0.001))
    _, bar = figure.axes
    assert [text.get_text() for text in bar.get_legend().get_texts()] == [
        "training 90.0 s",
        "starting 8.0 s",
        "saving 2.0 s",
    ]
    assert "90 %" in bar.get_title()


@pytest.mark.parametrize("goodput", [None, Goodput(), Goodput(starting=1.0)])
def test_a_run_without_metrics_can_be_drawn(goodput: Goodput | None) -> None:
    assert draw(Metrics(), goodput)._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
