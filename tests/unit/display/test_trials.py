"""The live table of a search."""

from __future__ import annotations

import re

import pytest
import watch
from screens import Screen

from distributor.display.choose import choose_trials
from distributor.display.console import Console
from distributor.display.notebook import render_trials
from distributor.display.plain import PlainTrials
from distributor.display.terminal import TerminalTrials
from distributor.display.trials import TrialRow, TrialsSnapshot, chosen, lines


def snapshot(count: int = 3, best: int | None = 1, **params: object) -> TrialsSnapshot:
    rows = tuple(TrialRow(n, "complete", {"lr": 0.25 * n, **params}, 10 * n, 1.5 - n) for n in range(count - 1))
    live = TrialRow(count - 1, "running", {"lr": 0.125, **params}, 7, None, is_live=True)
    return TrialsSnapshot("digits", "val/loss", 64, 62.0, (*rows, live), best)


def test_the_best_those_that_run_and_the_last_are_shown() -> None:
    rows = [TrialRow(n, "complete") for n in range(20)] + [TrialRow(n, "running", is_live=True) for n in (20, 21)]
    shown = chosen(TrialsSnapshot("s", "loss", 64, rows=tuple(rows), best=4), 5)
    assert [row.number for row in shown] == [4, 18, 19, 20, 21]
    assert len(chosen(TrialsSnapshot("s", "loss", 64, rows=tuple(rows), best=4), 0)) == 1


def test_rows_have_number_state_parameters_step_and_value() -> None:
    assert lines(snapshot()) == (
        ["trial", "state", "lr", "step", "val/loss"],
        [
            ["0", "complete", "0", "0", "1.5"],
            ["1 *", "complete", "0.25", "10", "0.5"],
            ["2", "running", "0.125", "7", ""],
        ],
    )


def test_a_value_stays_in_its_cell() -> None:
    _, rows = lines(snapshot(kind="a\nb\x1b[2J" + "c" * 100))
    assert rows[0][3] == "ab" + "c" * 19 + "..."


class TestTerminal:
    @pytest.fixture
    def screen(self, monkeypatch: pytest.MonkeyPatch) -> Screen:
        screen = Screen()
        monkeypatch.setattr("distributor.display.printer.output", lambda stream: screen)
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setenv("LINES", "12")
        return screen

    def test_the_table_stays_below_the_lines_of_trials_and_ends_in_one(self, screen: Screen) -> None:
        view = TerminalTrials()
        view.show(snapshot(100))
        watch.until(lambda: any("99" in line for line in screen.lines()))
        table = screen.lines()
        assert len(table) == 9  # an empty line, the heading, the titles and six trials
        assert "search digits: 99 of 64 trials ended, 1 running" in table[1]
        assert re.fullmatch(r"  trial  state +lr +step +val/loss", table[2].rstrip())
        assert re.fullmatch(r"  1 \*    complete +0.25 +10 +0.5", table[3].rstrip())
        trial = Console(lambda rank: "a")
        for number in range(3):
            trial.write(0, 1, b"line %d\n" % number)
        watch.until(lambda: any("line 2" in line for line in screen.lines()))
        watch.until(lambda: screen.lines()[3:] == table)
        assert screen.lines()[:3] == [f"[rank 0 a] line {number}" for number in range(3)]
        trial.close()
        assert screen.lines()[3:] == table
        view.close(snapshot(100))
        last = "".join(screen.lines()[3:])  # wrapped
        assert last.startswith("[distributor] search digits: 99 of 64 trials") and last.endswith("of trial 1")


def test_a_notebook_shows_the_best_in_bold_and_escapes_texts() -> None:
    html = render_trials(snapshot(kind="<b>"))
    assert "&lt;b&gt;" in html and html.count("<tr>") == 4
    assert html.count("font-weight:600") == 6  # cells of the best


def test_without_a_terminal_lines_say_what_has_ended() -> None:
    view = choose_trials()
    assert isinstance(view, PlainTrials) and view.announces
