"""What a run shows of itself: words, lines for files, a status for terminals, HTML for notebooks."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pyte
import pytest
import watch

from distributor.display import choose, notebook
from distributor.display.console import Console
from distributor.display.plain import PlainView
from distributor.display.snapshot import Snapshot, far, folded, reported, state
from distributor.display.terminal import TerminalView
from distributor.errors import NodeLostError, TrainingError
from distributor.values.job import Status
from distributor.values.outcome import Failure
from distributor.values.placement import Node, Placement
from distributor.values.reports import Progress

PLACEMENT = Placement(
    (
        Node(0, "a", "host-a", "10.0.0.1", 1, 0, 0, 3, ("0", "1", "2")),
        Node(1, "b", "host-<b>", "10.0.0.2", 1, 3, 3, 1, ("0",)),
    )
)
FAILURE = Failure(3, 0, "host-<b>", "ValueError", "ValueError: <lr>", "Traceback ...\nValueError: <lr>")
ERROR = TrainingError("rank 3 on host-<b> failed: ValueError: <lr>\n\nTraceback ...", [FAILURE])


def at(status: Status, **known: object) -> Snapshot:
    return Snapshot("3f2a", "train", 4, status, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (at(Status.WAITING), "starting"),
        (at(Status.WAITING, detail="waiting for 4 task slots: 1 is free"), "waiting for 4 task slots: 1 is free"),
        (at(Status.STARTING, detail="importing torch on 1 of 2 nodes"), "importing torch on 1 of 2 nodes"),
        (at(Status.WAITING, detail="sending 90 MiB to the server"), "sending 90 MiB to the server"),
        (at(Status.RUNNING, ranks_up=3), "running: 3 of 4 ranks up"),
        (at(Status.RUNNING, ranks_up=0), "finishing: all ranks have ended"),
        (at(Status.STOPPING, detail="a rank failed"), "stopping: a rank failed"),
        (at(Status.STOPPING), "stopping"),
        (at(Status.SUCCEEDED), "succeeded"),
        (at(Status.CANCELLED), "cancelled"),
        (at(Status.FAILED, error=ERROR), "failed: rank 3 on host-<b> failed: ValueError: <lr>"),
        (at(Status.FAILED, error=NodeLostError("")), "failed: NodeLostError"),
    ],
)
def test_where_a_run_stands_in_words(snapshot: Snapshot, words: str) -> None:
    assert state(snapshot) == words


FAR = {"progress": Progress(120, 1000, 12.34), "metrics": {f"m{number}": 0.123456 for number in range(10)}}


def test_what_ranks_have_reported_in_words() -> None:
    assert reported(at(Status.RUNNING)) == ""
    told = reported(at(Status.RUNNING, **FAR))
    assert told.startswith("step 120 of 1000, 12.3 steps/s, 1 min 11 s left, m0 0.1235, ")
    assert told.endswith(", m7 0.1235, and 2 more")
    assert far(Progress(7)) == "step 7"
    assert far(Progress(7, 10, 0.25)) == "step 7 of 10, 4 s/step, 12 s left"


def test_views_show_what_ranks_have_reported() -> None:
    running = at(Status.RUNNING, ranks_up=4, since=601.0, **FAR)
    assert any("  step 120 of 1000, 12.3 steps/s" in line for line in TerminalView().show(running, True).footer)
    (note, *_) = PlainView().show(running, True).notes
    assert ": step 120 of 1000, 12.3 steps/s" in note
    page = notebook.render(running)
    assert '<progress max="1000" value="120"></progress> step 120 of 1000' in page
    assert "<progress" not in notebook.render(at(Status.SUCCEEDED, **FAR))


def test_names_of_values_are_ranks_texts() -> None:
    running = at(Status.RUNNING, ranks_up=4, metrics={"<b>\x1b[2J": 1.0})
    assert "&lt;b&gt; 1" in notebook.render(running)
    assert not any("\x1b[2J" in line for line in TerminalView().show(running, True).footer)


def test_last_lines_that_are_alike_are_one_and_the_rest_is_counted() -> None:
    lines = {rank: f"epoch {rank // 2}" for rank in range(10)}
    assert folded(lines, 5) == [(f"ranks {2 * n}-{2 * n + 1}", f"epoch {n}") for n in range(5)]
    assert folded(lines, 3) == [("ranks 0-1", "epoch 0"), ("ranks 2-3", "epoch 1"), ("ranks 4-9", "...")]


class TestPlain:
    def shown(self, view: PlainView, snapshot: Snapshot) -> list[str]:
        shown = view.show(snapshot, True)
        assert shown.footer == ()
        return list(shown.notes)

    def test_what_takes_long_is_said(self) -> None:
        view = PlainView()
        waiting = at(Status.WAITING, detail="waiting for 4 task slots: 1 is free", name="digits")
        told = "run digits (3f2a): waiting for 4 task slots: 1 is free, 4.0 s"
        assert self.shown(view, replace(waiting, since=1)) == []
        assert self.shown(view, replace(waiting, since=4, lasting=4)) == [told]
        assert self.shown(view, replace(waiting, since=5, lasting=5)) == []
        changed = replace(waiting, detail="importing torch on 2 nodes")
        assert self.shown(view, replace(changed, since=6)) == []  # too soon after the last
        told = "run digits (3f2a): importing torch on 2 nodes, 34 s"
        assert self.shown(view, replace(changed, since=40, lasting=34)) == [told]

    def test_what_goes_on_is_said_again_ever_less_often(self) -> None:
        view = PlainView()
        importing = at(Status.WAITING, detail="importing torch on 2 nodes")
        told = [since for since in range(3000) if self.shown(view, replace(importing, since=since))]
        assert told == [3, 13, 26, 52, 104, 208, 416, 832, 1432, 2032, 2632]

    def test_a_quick_run_says_nothing(self) -> None:
        view = PlainView()
        for status in Status:
            assert self.shown(view, at(status, since=1, error=ERROR)) == []

    def test_a_run_that_goes_on_says_so_now_and_then(self) -> None:
        view = PlainView()
        running = at(Status.RUNNING, ranks_up=4, lines={0: "epoch 3", 1: "epoch 3"})
        told = [since for since in range(0, 1900, 10) if self.shown(view, replace(running, since=since))]
        assert told == [600, 1200, 1800]
        again = self.shown(view, replace(running, since=2400, seconds=2402))
        assert again == ["run 3f2a: running: 4 of 4 ranks up after 40 min 02 s", "  ranks 0-1: epoch 3"]

    def test_lines_have_no_escape_sequences(self) -> None:
        running = at(Status.RUNNING, ranks_up=4, since=700, lines={0: "\x1b[31mepoch\x1b[0m 3"})
        assert self.shown(PlainView(), running)[1:] == ["  rank 0: epoch 3"]

    def test_a_status_that_comes_back_is_news(self) -> None:
        view = PlainView()
        assert self.shown(view, at(Status.STARTING, since=5)) != []
        assert self.shown(view, at(Status.STOPPING, since=5, detail="cancelled")) == ["run 3f2a: stopping: cancelled"]

    def test_packing_that_is_quick_says_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        with PlainView().packing("project") as packed:
            packed(0, 10)
        assert capsys.readouterr().err == ""

    def test_packing_that_takes_long_is_said_once(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = iter([0.0, 1.0, 4.0, 5.0])
        monkeypatch.setattr("distributor.display.plain.time.monotonic", lambda: next(times))
        with PlainView().packing("project") as packed:
            for done in range(3):
                packed(done, 300 << 20)
        assert capsys.readouterr().err == "[distributor] packing project: 300 MiB\n"


class TestTerminal:
    @pytest.fixture(autouse=True)
    def narrow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "60")

    def test_only_while_somebody_waits(self) -> None:
        view = TerminalView()
        assert view.show(at(Status.RUNNING), False) == ((), ())
        assert view.show(at(Status.RUNNING), True).footer

    def test_it_ends_in_a_line(self) -> None:
        assert TerminalView().show(at(Status.SUCCEEDED, seconds=3), True) == ((), ("run 3f2a succeeded in 3.0 s",))
        assert TerminalView().show(at(Status.FAILED, error=ERROR), True) == ((), ())

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


class Screen:
    """A terminal as its user sees it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.screen = pyte.Screen(60, 12)
        self.stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def flush(self) -> None:
        pass

    def lines(self) -> list[str]:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip("\n").split("\n")


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


class Text(HTMLParser):
    """The text of HTML, and what it needs to be well formed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag not in ("script", "style", "link", "img")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


class TestNotebook:
    def test_a_run_that_goes_on(self) -> None:
        html = notebook.render(at(Status.RUNNING, seconds=83, ranks_up=4, placement=PLACEMENT, lines={0: "<b>1</b>"}))
        text = Text(html).text
        for part in ("running", "4 of 4 ranks up", "1 min 23 s", "2 nodes", "rank 0", "<b>1</b>", "host-<b>", "3"):
            assert part in text

    def test_a_run_that_failed(self) -> None:
        failed = at(
            Status.FAILED, placement=PLACEMENT, error=ERROR, timings={"agent": 1.0, "function": 3.0, "total": 4.0}
        )
        text = Text(notebook.render(failed)).text
        for part in ("failed", "ValueError: <lr>", "traceback of rank 3", "agent 1.0 s", "function 3.0 s"):
            assert part in text
        assert "total" not in text
        assert notebook.render(failed, unfolded=True).count("<details open") == 2
        assert notebook.render(failed).count("<details open") == 0
        raised = replace(failed, raised=True)  # the error below it has the traceback
        assert "traceback of" not in notebook.render(raised)
        assert "traceback of rank 3" in notebook.render(raised, unfolded=True)

    def test_no_escape_sequences(self) -> None:
        """HTML knows none, and what is between them is text."""
        failure = replace(FAILURE, message="\x1b[31mno", traceback="Traceback \x1b[1m...")
        error = TrainingError("rank 3 failed: \x1b[31mno", [failure])
        for snapshot in (
            at(Status.RUNNING, lines={0: "\x1b[31mloss\x1b[0m"}),
            at(Status.STOPPING, detail="a rank failed: \x1b]0;title\x07no"),
            at(Status.FAILED, error=error),
        ):
            html = notebook.render(snapshot, unfolded=True)
            assert not re.search(r"[\x00-\x08\x0e-\x1f]|0;title|\[31m|\[1m", html)

    @pytest.mark.parametrize("status", list(Status))
    def test_every_status(self, status: Status) -> None:
        error = ERROR if status is Status.FAILED else None
        assert status.value in Text(notebook.render(at(status, error=error))).text

    def test_many_nodes(self) -> None:
        nodes = tuple(Node(n, str(n), f"host-{n}", "10.0.0.1", 1, n, n, 1) for n in range(100))
        assert "and 68 more" in Text(notebook.render(at(Status.RUNNING, placement=Placement(nodes)))).text


def test_the_view_fits_where_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose.choose(), PlainView)  # pytest captures stderr
    monkeypatch.setattr("sys.stderr", Screen())
    assert isinstance(choose.choose(), TerminalView)
    monkeypatch.setattr("sys.stderr", None)
    assert isinstance(choose.choose(), PlainView)
