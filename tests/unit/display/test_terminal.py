"""A run's live status in a terminal."""

from __future__ import annotations

import re

import pytest
from snapshots import PLACEMENT, at

from distributor.display.terminal import TerminalView
from distributor.errors import TrainingError
from distributor.values.job import Status


class TestTerminal:
    @pytest.fixture(autouse=True)
    def narrow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "60")

    def test_the_status_is_drawn_only_while_a_caller_waits(self) -> None:
        view = TerminalView()
        assert view.show(at(Status.RUNNING), False) == ((), ())
        assert view.show(at(Status.RUNNING), True).footer

    def test_it_ends_in_a_line(self) -> None:
        assert TerminalView().show(at(Status.SUCCEEDED, seconds=3), True) == ((), ("run 3f2a succeeded in 3.0 s",))
        assert TerminalView().show(at(Status.FAILED, error=TrainingError("rank 3 failed")), True) == ((), ())

    def test_lines_fit(self) -> None:
        lines = {0: "loss " + "9" * 100, 1: "[bold]no markup[/bold]"}
        shown = TerminalView().show(at(Status.RUNNING, ranks_up=4, placement=PLACEMENT, lines=lines), True)
        plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in shown.footer]
        assert "running: 4 of 4 ranks up  0.0 s, on 2 nodes, run 3f2a" in plain[0]
        assert plain[1].startswith("  rank 0  loss 999")
        assert plain[2].rstrip() == "  rank 1  [bold]no markup[/bold]"
        assert all(len(line) <= 59 for line in plain)

    def test_a_line_of_a_rank_keeps_its_colours_and_fits(self) -> None:
        lines = {0: "\x1b[31m" + "9" * 100 + "\x1b[0m"}
        detail = "a rank failed: \x1b]0;title\x07\x1b[2Jno"
        shown = TerminalView().show(at(Status.STOPPING, detail=detail, lines=lines), True)
        assert re.search(r"\x1b\[31m9{30}", shown.footer[1])
        plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in shown.footer]
        assert "stopping: a rank failed: no" in plain[0]
        assert not any("\x1b" in line or len(line) > 59 for line in plain)

    def test_no_colours_where_they_are_not_wanted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        shown = TerminalView().show(at(Status.RUNNING), True)
        assert not re.search(r"\x1b\[[\d;]*3\dm", "".join(shown.footer))

    def test_names_of_many_ranks_leave_room_for_their_lines(self) -> None:
        lines = {rank: ("even", "odd one", "third")[rank % 3] for rank in range(64)}
        footer = TerminalView().show(at(Status.RUNNING, ranks_up=64, lines=lines), True).footer
        plain = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in footer]
        assert plain[1] == "  ranks 0, 3, 6 and 19 more  even"
        assert plain[2].endswith("odd one")
