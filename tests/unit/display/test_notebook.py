"""A run as HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from snapshots import ERROR, FAILURE, PLACEMENT, at

from distributor.display import notebook
from distributor.display.terminal import TerminalView
from distributor.errors import TrainingError
from distributor.values.job import Status
from distributor.values.placement import Node, Placement


def test_names_of_values_are_ranks_texts() -> None:
    running = at(Status.RUNNING, ranks_up=4, metrics={"<b>\x1b[2J": 1.0})
    assert "&lt;b&gt; 1" in notebook.render(running)
    assert not any("\x1b[2J" in line for line in TerminalView().show(running, True).footer)


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
