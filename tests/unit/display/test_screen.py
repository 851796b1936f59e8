"""What a terminal shows of the ranks' lines, a progress bar and a footer."""

from __future__ import annotations

import os
import pty
import sys
import termios

import pytest
import watch
from screens import Screen

from distributor.display.console import Console
from distributor.display.screen import is_terminal, size_of


class TestConsole:
    @pytest.fixture
    def screen(self, monkeypatch: pytest.MonkeyPatch) -> Screen:
        screen = Screen()
        monkeypatch.setattr(
            "distributor.display.printer.output", lambda stream: screen
        )  # pytest replaces sys.stderr itself
        monkeypatch.setenv("COLUMNS", "60")
        return screen

    def until(self, screen: Screen, lines: list[str]) -> None:
        watch.until(lambda: screen.lines() == lines)

    def test_a_footer_stays_below_the_lines(self, screen: Screen) -> None:
        console = Console(lambda rank: "host-a")
        console.footer(["running", "  rank 0  hello"])
        self.until(screen, ["", "running", "  rank 0  hello"])
        console.write(0, 1, b"hello\n")
        self.until(screen, ["[rank 0 host-a] hello", "", "running", "  rank 0  hello"])
        console.write(0, 2, b"10 %\r20 %")
        self.until(screen, ["[rank 0 host-a] hello", "", "[rank 0 host-a] 20 %", "running", "  rank 0  hello"])
        console.footer(["stopping"])
        self.until(screen, ["[rank 0 host-a] hello", "", "[rank 0 host-a] 20 %", "stopping"])
        console.footer([])
        self.until(screen, ["[rank 0 host-a] hello", "[rank 0 host-a] 20 %"])
        console.write(0, 2, b"\n")
        console.note("run 3f2a succeeded")
        console.close()
        assert screen.lines() == ["[rank 0 host-a] hello", "[rank 0 host-a] 20 %", "[distributor] run 3f2a succeeded"]

    def test_what_others_write_is_not_erased_with_it(self, screen: Screen) -> None:
        console = Console(lambda rank: "host-a")
        console.footer(["running", "more"])
        self.until(screen, ["", "running", "more"])
        screen.write("a warning of somebody else's\n")
        console.footer(["running still", "more"])
        self.until(screen, ["a warning of somebody else's", "", "running still", "more"])
        console.close()
        assert screen.lines() == ["a warning of somebody else's"]

    def test_at_the_bottom_of_the_screen(self, screen: Screen) -> None:
        console = Console(lambda rank: "a")
        for number in range(20):
            console.write(0, 1, b"%d\n" % number)
        console.footer(["one", "two"])
        self.until(screen, [*(f"[rank 0 a] {number}" for number in range(11, 20)), "", "one", "two"])
        console.write(0, 1, b"20\n")
        self.until(screen, [*(f"[rank 0 a] {number}" for number in range(12, 21)), "", "one", "two"])
        console.close()

    def test_no_prefix(self, capsys: pytest.CaptureFixture[str]) -> None:
        console = Console(lambda rank: "a", prefix=False)
        console.write(1, 1, b"one\n\ntwo\n")
        console.write(0, 2, b"three")
        console.note("a note")
        console.close()
        assert capsys.readouterr() == ("one\n\ntwo\n", "[distributor] a note\nthree\n")

    def test_where_stderr_is_no_terminal_there_is_no_footer(self, capsys: pytest.CaptureFixture[str]) -> None:
        console = Console(lambda rank: "a")
        console.footer(["running"])
        console.write(0, 1, b"one\n")
        console.close()
        assert capsys.readouterr() == ("[rank 0 a] one\n", "")

    def test_a_bar_of_one_run_leaves_the_status_of_another(self, screen: Screen) -> None:
        table, trial = Console(lambda rank: ""), Console(lambda rank: "a")
        table.footer(["3 of 20 trials ended", "best 0.5"])
        self.until(screen, ["", "3 of 20 trials ended", "best 0.5"])
        trial.write(0, 2, b"10 %\r20 %")
        trial.write(0, 1, b"one\ntwo\n")
        self.until(screen, ["[rank 0 a] one", "[rank 0 a] two", "", "3 of 20 trials ended", "best 0.5"])
        trial.close()
        table.footer(["4 of 20 trials ended"])
        self.until(screen, ["[rank 0 a] one", "[rank 0 a] two", "[rank 0 a] 20 %", "", "4 of 20 trials ended"])
        table.close()
        assert screen.lines() == ["[rank 0 a] one", "[rank 0 a] two", "[rank 0 a] 20 %"]

    def test_two_runs_take_turns_below_the_lines(self, screen: Screen) -> None:
        consoles = [Console(lambda rank: "a") for _ in range(2)]
        for console, lines in zip(consoles, (["a long status of one", "more"], ["short"])):
            console.footer(lines)
            self.until(screen, ["", *lines])
        for console in consoles:
            console.close()

    def test_whoever_no_longer_waits_may_write_where_the_status_was(self, screen: Screen) -> None:
        console = Console(lambda rank: "a")
        console.footer(["running", "more"])
        self.until(screen, ["", "running", "more"])
        console.footer([])
        console.await_footer(watch.DEADLINE)
        screen.write(">>> ")
        assert screen.lines() == [">>>"]
        console.close()
        assert screen.lines() == [">>>"]


def test_the_size_is_that_of_the_terminal_that_is_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    outer, inner = pty.openpty()
    termios.tcsetwinsize(inner, (20, 57))
    with open(inner, "w") as out, open(os.devnull, "w") as elsewhere:
        monkeypatch.setattr(sys, "__stdout__", elsewhere)  # train.py > log
        assert size_of(out) == (57, 20)
    os.close(outer)


@pytest.mark.parametrize(("kind", "found"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_moves_no_cursor(monkeypatch: pytest.MonkeyPatch, kind: str, found: bool) -> None:
    monkeypatch.setenv("TERM", kind)
    assert is_terminal(Screen()) is found  # type: ignore[arg-type]
