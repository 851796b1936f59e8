"""Output on the driver: each byte once, whatever way it comes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from distributor.display import log_files
from distributor.display.logs import Logs
from distributor.values.outcome import UNCAUGHT, Log


class Console:
    def __init__(self) -> None:
        self.shown: dict[tuple[int, int], bytes] = {}
        self.gaps: list[tuple[int, int, int]] = []
        self.closed = 0

    def write(self, rank: int, stream: int, data: bytes) -> None:
        self.shown[rank, stream] = self.shown.get((rank, stream), b"") + data

    def end_lines(self) -> None:
        for key, shown in self.shown.items():
            self.shown[key] = shown if shown.endswith(b"\n") else shown + b"\n"

    def skipped(self, rank: int, stream: int, lines: int) -> None:
        self.gaps.append((rank, stream, lines))

    def close(self) -> None:
        self.closed += 1


def make(folder: Path | None = None) -> tuple[Logs, Console]:
    console = Console()
    return Logs(console, folder), console  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=8))
def test_pieces_that_come_twice_count_once(tmp_path_factory, text, resent) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("logs")
    logs, console = make(folder)
    sent = 0
    for start, size in resent:
        start = min(start, sent)  # a node never sends what is beyond what it has sent before
        piece = text[start : start + size]
        logs.take(Log(0, 1, start, piece))
        sent = max(sent, start + len(piece))
    logs.take(Log(0, 1, sent, text[sent:]))
    assert console.shown.get((0, 1), b"") == text
    logs.close()
    kept = folder / "rank-0.stdout"
    assert (kept.read_bytes() if kept.exists() else b"") == text


def test_offsets_are_of_the_ranks_that_are_asked_for() -> None:
    logs, _ = make()
    logs.take(Log(0, 1, 0, b"abc"))
    logs.take(Log(1, 2, 0, b"de"))
    assert logs.offsets(range(2)) == ((0, 1, 3), (1, 2, 2))
    assert logs.offsets(range(1, 9)) == ((1, 2, 2),)


def test_a_gap_is_told_once_and_output_goes_on_after_it(tmp_path: Path) -> None:
    logs, console = make(tmp_path)
    logs.take(Log(0, 1, 0, b"abc\n"))
    logs.skip(0, 1, 7, 100)
    logs.skip(0, 1, 7, 100)
    logs.take(Log(0, 1, 100, b"later\n"))
    assert console.gaps == [(0, 1, 7)]
    assert console.shown[0, 1] == b"abc\nlater\n"
    assert logs.offsets([0]) == ((0, 1, 106),)


def test_the_last_line_is_remembered() -> None:
    logs, _ = make()
    logs.take(Log(0, 1, 0, b"first\nsecond\n\n"))
    logs.take(Log(1, 2, 0, b" 10%\r 20%"))
    assert logs.last_lines == {0: "second", 1: " 20%"}


def test_an_uncaught_exception_is_held_until_the_end_and_kept_in_order(tmp_path: Path) -> None:
    logs, console = make(tmp_path)
    for rank in range(2):
        logs.take(Log(rank, 2, 0, b"before\n"))
        logs.take(Log(rank, UNCAUGHT, 0, b"Trace"))
        logs.take(Log(rank, 2, 7, b"between\n"))
        logs.take(Log(rank, UNCAUGHT, 0, b"Traceback\n"))
        logs.take(Log(rank, 2, 15, b"after\n"))
        logs.flush()
        assert (tmp_path / f"rank-{rank}.stderr").read_bytes() == b"before\nTracebetween\nback\nafter\n"
    assert console.shown == {(0, 2): b"before\nbetween\nafter\n", (1, 2): b"before\nbetween\nafter\n"}
    assert logs.offsets([1]) == ((1, 2, 21), (1, UNCAUGHT, 10))
    logs.release([0])
    assert console.shown == {(0, 2): b"before\nbetween\nafter\n", (1, 2): b"before\nbetween\nafter\nTraceback\n"}


def test_a_full_disk_ends_the_files_and_not_the_run(tmp_path: Path) -> None:
    logs, console = make(tmp_path / "not there")
    logs.take(Log(0, 1, 0, b"abc"))
    logs.take(Log(0, 1, 3, b"def"))
    logs.close()
    assert logs.incomplete.startswith(f"{tmp_path / 'not there'} are incomplete: [Errno 2] No such file or directory")
    assert console.shown[0, 1] == b"abcdef"
    assert console.closed == 1


@pytest.mark.parametrize("ends", [True, False])
def test_a_disk_that_pauses_holds_up_nobody(ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived is written later, unless nothing is for very long."""
    goes_on, write = threading.Event(), os.pwrite

    def paused(*arguments: Any) -> int:
        goes_on.wait()
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", paused)
    monkeypatch.setattr(log_files, "_PATIENCE", 60.0 if ends else 0.1)
    logs, console = make(tmp_path)
    for place in range(100):
        logs.take(Log(0, 1, place, b"x"))
    assert logs.offsets([0]) == ((0, 1, 100),)
    assert console.shown[0, 1] == b"x" * 100
    if ends:
        goes_on.set()
    logs.flush()
    assert logs.incomplete == ("" if ends else f"{tmp_path} are incomplete: nothing could be written for 0.1 s")
    assert len((tmp_path / "rank-0.stdout").read_bytes()) == (100 if ends else 0)
    goes_on.set()
    logs.close()


def test_files_are_written_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    logs, _ = make(tmp_path)
    logs.take(Log(0, 1, 0, b"abc"))
    assert (tmp_path / "rank-0.stdout").read_bytes() == b"abc"


def test_a_last_line_has_colours_and_no_other_escape_sequence() -> None:
    logs, console = make()
    text = b"\x1b]52;c;" + b"A" * 1000 + b"\x07\x1b[31mloss\x1b[0m\x1b[2K\n\x1b]0;title\x07\n"
    for place, byte in enumerate(text):
        logs.take(Log(0, 1, place, bytes([byte])))
        assert "A" not in logs.last_lines.get(0, "")
        assert "title" not in logs.last_lines.get(0, "")
    logs.take(Log(1, 1, 0, text))
    assert logs.last_lines[1] == "\x1b[31mloss\x1b[0m"
    assert console.shown[0, 1] == console.shown[1, 1] == text
    logs.take(Log(1, 1, len(text), b"x" * (1 << 20) + b"\nend \x1b[32m" + b"9" * 198))
    assert logs.last_lines[1] == "9" * 198


def test_a_line_that_an_attempt_leaves_unfinished_ends_with_it() -> None:
    logs, console = make()
    logs.take(Log(0, 1, 0, b"step 29\nste"))
    logs.release(())
    logs.begin_again()
    logs.take(Log(0, 1, 0, b"resuming from step 20\n"))
    assert console.shown[0, 1] == b"step 29\nste\nresuming from step 20\n"
