"""The state of a run in words, which all views show."""

from __future__ import annotations

import pytest
from snapshots import ERROR, at

from distributor.display import notebook
from distributor.display.plain import PlainView
from distributor.display.snapshot import Snapshot, far, folded, reported, state
from distributor.display.terminal import TerminalView
from distributor.errors import NodeLostError
from distributor.values.job import Status
from distributor.values.reports import Progress


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
def test_the_status_in_words(snapshot: Snapshot, words: str) -> None:
    assert state(snapshot) == words


FAR = {"progress": Progress(120, 1000, 12.34), "metrics": {f"m{number}": 0.123456 for number in range(10)}}


def test_reports_in_words() -> None:
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


def test_last_lines_that_are_alike_are_one_and_the_rest_is_counted() -> None:
    lines = {rank: f"epoch {rank // 2}" for rank in range(10)}
    assert folded(lines, 5) == [(f"ranks {2 * n}-{2 * n + 1}", f"epoch {n}") for n in range(5)]
    assert folded(lines, 3) == [("ranks 0-1", "epoch 0"), ("ranks 2-3", "epoch 1"), ("ranks 4-9", "...")]
