"""The lines that a run prints where nothing can be redrawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshots import ERROR, at

from distributor.display.plain import PlainView
from distributor.display.snapshot import Snapshot
from distributor.values.job import Status


class TestPlain:
    def shown(self, view: PlainView, snapshot: Snapshot) -> list[str]:
        shown = view.show(snapshot, True)
        assert shown.footer == ()
        return list(shown.notes)

    def test_a_status_that_lasts_is_printed(self) -> None:
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

    def test_an_unchanged_status_is_printed_less_and_less_often(self) -> None:
        view = PlainView()
        importing = at(Status.WAITING, detail="importing torch on 2 nodes")
        told = [since for since in range(3000) if self.shown(view, replace(importing, since=since))]
        assert told == [3, 13, 26, 52, 104, 208, 416, 832, 1432, 2032, 2632]

    def test_a_quick_run_prints_nothing(self) -> None:
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

    def test_quick_packing_prints_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        with PlainView().packing("project") as packed:
            packed(0, 10)
        assert capsys.readouterr().err == ""

    def test_slow_packing_prints_one_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = iter([0.0, 1.0, 4.0, 5.0])
        monkeypatch.setattr("distributor.display.plain.time.monotonic", lambda: next(times))
        with PlainView().packing("project") as packed:
            for done in range(3):
                packed(done, 300 << 20)
        assert capsys.readouterr().err == "[distributor] packing project: 300 MiB\n"
