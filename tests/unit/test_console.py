"""The ranks' lines on the driver: whole, in order, prefixed, whatever the display does."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributor import console as module
from distributor.console import Console, _Fold, _Screen


def host_of(rank: int) -> str:
    return f"host-{rank}"


class Out:
    """What has been printed so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._text = capsys, ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().out
        return self._text


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Out:
    return Out(capsys)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_of(text: str) -> list[str]:
    """The lines that a terminal shows after such output."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            erases = part.endswith("\x1b[K") or part.startswith("\x1b[K")
            part = part.replace("\x1b[K", "")
            shown = part if erases else part + shown[len(part) :]
        lines.append(re.sub(r"\x1b\[\d+m", "", shown).rstrip())
    return lines


def show(*pieces: tuple[int, int, bytes], **options: Any) -> None:
    console = Console(host_of, **options)
    for piece in pieces:
        console.write(*piece)
    console.close()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.text("ab \n", max_size=8)), max_size=20))
def test_lines_are_whole_and_in_order_however_they_are_cut(pieces: list[tuple[int, str]]) -> None:
    saved, sys.stdout = sys.stdout, io.StringIO()
    try:
        show(*((rank, 1, text.encode()) for rank, text in pieces))
        shown = sys.stdout.getvalue()
    finally:
        sys.stdout = saved
    for rank in range(3):
        said = "".join(text for at, text in pieces if at == rank)
        lines = said.split("\n")
        lines = lines if lines[-1] else lines[:-1]
        prefix = f"[rank {rank} host-{rank}] "
        assert [line.removeprefix(prefix) for line in shown.splitlines() if line.startswith(prefix)] == lines


def test_each_stream_goes_where_it_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    show((0, 1, b"to out\n"), (1, 2, b"to err\n"))
    assert capsys.readouterr() == ("[rank 0 host-0] to out\n", "[rank 1 host-1] to err\n")


def test_invalid_utf8_does_no_harm(out: Out) -> None:
    show((0, 1, b"\xff\xfe ok\n"))
    assert out.getvalue() == "[rank 0 host-0] \ufffd\ufffd ok\n"


def test_nothing_is_cut_off(out: Out) -> None:
    show((0, 1, b"x" * 3_000_000), (0, 1, b"y" * 2_000_000 + b"\n"))
    assert out.getvalue() == "[rank 0 host-0] " + "x" * 3_000_000 + "y" * 2_000_000 + "\n"


def test_a_line_without_end_is_shown_at_last(out: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LINE", 1000)
    show((0, 1, b"x" * 1001), (0, 1, b"y\n"))
    assert out.getvalue() == f"[rank 0 host-0] {'x' * 1001}\n[rank 0 host-0] y\n"


def test_only_the_ranks_that_are_asked_for(out: Out) -> None:
    console = Console(host_of, ranks=(1,))
    console.write(0, 1, b"no\n")
    console.skipped(0, 1, 5)
    console.write(1, 1, b"yes\n")
    console.close()
    assert out.getvalue() == "[rank 1 host-1] yes\n"
    before = threading.active_count()
    Console(host_of, ranks=()).write(0, 1, b"no\n")
    assert threading.active_count() == before  # without a line there is no thread


def test_an_encoding_that_lacks_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    show((0, 1, "ä\n".encode()))
    assert raw.getvalue() == b"[rank 0 host-0] \\xe4\n"


@pytest.mark.parametrize("broken", [None, "closed"])
def test_without_an_output_nothing_happens(monkeypatch: pytest.MonkeyPatch, broken: str | None) -> None:
    stream = io.StringIO() if broken else None
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    show((0, 1, b"lost\n"))


def test_closing_twice_is_harmless(out: Out) -> None:
    console = Console(host_of)
    console.write(0, 1, b"unfinished")
    console.close()
    console.close()
    assert out.getvalue() == "[rank 0 host-0] unfinished\n"


class Blocked(io.StringIO):
    """A display that takes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.let.wait()
        return super().write(text)


def test_a_blocked_display_holds_up_nobody_and_what_it_misses_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Blocked()
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console(host_of, limit=1000)
    console.write(0, 1, b"first\n")
    assert stream.entered.wait(30)
    for number in range(10_000):  # would block here
        console.write(number % 2, 1, b"line %d\n" % number)
    assert console._waiting <= 1000
    start = time.monotonic()
    console.close(timeout=0.1)
    assert time.monotonic() - start < 20
    stream.let.set()
    console.close(timeout=30)
    lines = stream.getvalue().splitlines()
    skipped = [
        int(number.replace(",", ""))
        for number in re.findall(r"\.\.\. ([\d,]+) lines skipped: the display was behind", stream.getvalue())
    ]
    assert lines[0] == "[rank 0 host-0] first"
    assert sum(skipped) + len(lines) - len(skipped) == 10_001
    assert sum(skipped) > 9000


def test_what_a_node_skipped_is_said_in_its_place(out: Out) -> None:
    console = Console(host_of)
    console.write(0, 1, b"before\nhalf a li")
    console.skipped(0, 1, 1234)
    console.write(0, 1, b"after\n")
    console.close()
    assert out.getvalue().splitlines() == [
        "[rank 0 host-0] before",
        "[rank 0 host-0] ... 1,234 lines skipped: the display was behind",
        "[rank 0 host-0] after",
    ]


def test_of_a_line_that_redraws_itself_its_last_state_counts(out: Out) -> None:
    show((0, 1, b"10%\r20%\r30%\nwindows\r\n"), (1, 1, b"\r 1%"), (1, 1, b"\r 2%"), (1, 1, b"\r"), (1, 1, b"\n"))
    assert sorted(out.getvalue().splitlines()) == [
        "[rank 0 host-0] 30%",
        "[rank 0 host-0] windows",
        "[rank 1 host-1]  2%",
    ]


def test_a_bar_that_runs_for_days_takes_no_memory(out: Out) -> None:
    console = Console(host_of)
    for step in range(10_000):
        console.write(0, 2, b"\r%5d/10000" % step)
    assert len(console._partial[0, 2]) < 100
    console.close()


def test_a_bar_is_one_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("NO_COLOR", "1")
    screen = _Screen()
    screen.draw({(1, 2): ("[rank 1 host-1] ", b" 10%"), (0, 2): ("[rank 0 host-0] ", b" 20%")})
    assert screen_of(stream.getvalue()) == ["[rank 0 host-0]  20%"]
    screen.print(1, "[rank 1 host-1] a line\n")
    screen.draw({(0, 2): ("[rank 0 host-0] ", b" 30%")})
    assert screen_of(stream.getvalue()) == ["[rank 1 host-1] a line", "[rank 0 host-0]  30%"]
    screen.draw({})
    assert screen_of(stream.getvalue()) == ["[rank 1 host-1] a line", ""]


def test_a_bar_and_lines_of_others_end_in_a_clean_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(host_of)
    for step in range(50):
        console.write(0, 2, b"\r%3d/50 steps" % (step + 1))
        console.write(1, 1, b"line %d\n" % step)
    console.write(0, 2, b"\n")
    console.close()
    shown = screen_of(stream.getvalue())
    assert [line for line in shown if "rank 1" in line] == [f"[rank 1 host-1] line {step}" for step in range(50)]
    assert [line for line in shown if "rank 0" in line] == ["[rank 0 host-0]  50/50 steps"]


def test_a_notebook_gets_no_codes_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stdout", notebook)
    screen = _Screen()
    screen.draw({(0, 1): ("[rank 0 host-0] ", b"100 of 1000")})
    screen.draw({(0, 1): ("[rank 0 host-0] ", b"done")})
    assert "\x1b" not in notebook.getvalue()
    assert screen_of(notebook.getvalue()) == ["[rank 0 host-0] done"]


def test_a_bar_in_a_file_is_a_line_now_and_then(out: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    screen = _Screen()
    for percent in range(100):
        screen.draw({(0, 1): ("[rank 0 host-0] ", b"%d%%" % percent)})
        now[0] += 1
    assert out.getvalue().splitlines() == [f"[rank 0 host-0] {percent}%" for percent in range(10, 100, 10)]


def test_prefixes_are_coloured_on_terminals_only(monkeypatch: pytest.MonkeyPatch, out: Out) -> None:
    show((0, 1, b"plain\n"))
    assert out.getvalue() == "[rank 0 host-0] plain\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    show((0, 1, b"a\n"), (1, 1, b"b\n"))
    assert stream.getvalue() == "\x1b[36m[rank 0 host-0]\x1b[0m a\n\x1b[33m[rank 1 host-1]\x1b[0m b\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", again := Terminal())
    show((0, 1, b"a\n"))
    assert again.getvalue() == "[rank 0 host-0] a\n"


def test_equal_lines_are_folded(out: Out) -> None:
    pieces = [(rank, 1, b"epoch 1\nepoch 2\n") for rank in (0, 1, 2, 5)]
    show(*pieces, (3, 1, b"epoch 1\nalone\n"), fold=True, world_size=6)
    assert out.getvalue().splitlines() == [
        "[ranks 0-3, 5] epoch 1",
        "[ranks 0-2, 5] epoch 2",
        "[rank 3 host-3] alone",
    ]


def test_a_line_that_all_have_said_does_not_wait() -> None:
    fold = _Fold(2)
    fold.add(0, 1, "same", now=0.0)
    assert list(fold.leaving(0.1, everything=False)) == []
    fold.add(1, 1, "same", now=0.1)
    assert list(fold.leaving(0.1, everything=False)) == [(1, "same", [0, 1])]
    fold.add(0, 1, "late", now=1.0)
    assert list(fold.leaving(1.0 + module._FOLD_WAIT, everything=False)) == [(1, "late", [0])]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.booleans()), max_size=60))
def test_folding_keeps_each_ranks_lines_and_their_order(said: list[tuple[int, str, bool]]) -> None:
    fold, shown = _Fold(4), []
    for now, (rank, text, look) in enumerate(said):
        fold.add(rank, 1, text, now * 0.1)
        if look:
            shown += list(fold.leaving(now * 0.1, everything=False))
    shown += list(fold.leaving(0.0, everything=True))
    for rank in range(4):
        assert [text for _, text, ranks in shown if rank in ranks] == [text for at, text, _ in said if at == rank]
    assert all(len(set(ranks)) == len(ranks) for _, _, ranks in shown)
