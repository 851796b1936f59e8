"""The ranks' output on the driver."""

from __future__ import annotations

import io
import itertools
import re
import shutil
import sys
import threading
import time
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from distributor.display import backlog, console as module, printer as printing
from distributor.display.console import Console

#: Seconds after which a test has failed.
DEADLINE = 60

NEVER = 1e9

SKIPPED = re.compile(r"\[rank (\d+) host-\d+\] \.\.\. ([\d,]+) lines? skipped: the (display|node) could not keep up")


def host_of(rank):
    return f"host-{rank}"


class Stream(io.StringIO):
    """An output that tests can watch."""

    terminal = False

    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()

    def isatty(self):
        return self.terminal

    def write(self, text):
        with self.changed:
            count = super().write(text)
            self.changed.notify_all()
        return count

    def until(self, *texts):
        """Waits until it contains all of some texts."""
        with self.changed:
            assert self.changed.wait_for(lambda: all(text in self.getvalue() for text in texts), DEADLINE), texts

    def lines(self):
        return self.getvalue().splitlines()


class Terminal(Stream):
    terminal = True

    def screen(self):
        """What a user sees: lines, the last of which may be live."""
        lines = [""]
        for part in re.split(r"(\n|\r|\x1b\[K|\x1b\[\d+m)", self.getvalue()):
            if part == "\n":
                lines.append("")
                column = 0
            elif part == "\r":
                column = 0
            elif part == "\x1b[K":
                lines[-1] = lines[-1][:column]
            elif not re.fullmatch(r"\x1b\[\d+m", part):
                column = 0 if not lines[-1] else column
                lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines]


class Notebook(Terminal):
    __module__ = "ipykernel.iostream"  # which may say that it is a terminal


class Gate(Stream):
    """An output that blocks, as a pipe that nobody reads."""

    def __init__(self):
        super().__init__()
        self.stuck = threading.Event()
        self.open = threading.Event()

    def write(self, text):
        self.stuck.set()
        assert self.open.wait(DEADLINE)
        return super().write(text)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def use(monkeypatch):
    """Makes streams of a kind sys.stdout and sys.stderr."""

    def replace(kind, error_kind=None):
        out = kind()
        err = error_kind() if error_kind else out
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return (out, err) if error_kind else out

    return replace


def display_threads():
    return [thread for thread in threading.enumerate() if thread.name == "distributor-display"]


def show(*pieces, **options):
    console = Console(host_of, **options)
    for piece in pieces:
        console.write(*piece)
    console.close()


@pytest.mark.parametrize(
    ("pieces", "out", "err"),
    [
        pytest.param([(0, 1, b"epoch 1\n")], "[rank 0 host-0] epoch 1\n", "", id="line"),
        pytest.param([(3, 2, b"oh\n")], "", "[rank 3 host-3] oh\n", id="stderr"),
        pytest.param([(0, 1, b"a\n\nb\n")], "[rank 0 host-0] a\n[rank 0 host-0] \n[rank 0 host-0] b\n", "", id="lines"),
        pytest.param([(0, 1, b"")], "", "", id="nothing"),
        pytest.param([(0, 1, b"unfinished")], "[rank 0 host-0] unfinished\n", "", id="unfinished"),
        pytest.param([(0, 1, b"ep"), (0, 1, b"och"), (0, 1, b" 1\n2")] * 2, None, "", id="joined"),
        pytest.param(
            [(0, 1, b"a"), (1, 1, b"b"), (0, 2, b"c"), (0, 1, b"A\n"), (1, 1, b"B\n"), (0, 2, b"C\n")],
            "[rank 0 host-0] aA\n[rank 1 host-1] bB\n",
            "[rank 0 host-0] cC\n",
            id="ranks-and-streams-apart",
        ),
        pytest.param([(0, 1, b"\xff\xfe|\n")], "[rank 0 host-0] \ufffd\ufffd|\n", "", id="not-utf-8"),
        pytest.param([(0, 1, b"\xc3"), (0, 1, b"\xa4\n")], "[rank 0 host-0] ä\n", "", id="character-in-two-pieces"),
        pytest.param([(0, 1, b"a\x0bb\xe2\x80\xa8c\n")], "[rank 0 host-0] a\x0bb\u2028c\n", "", id="odd-separators"),
        # Carriage returns, in no terminal
        pytest.param([(0, 1, b"a\r\n")], "[rank 0 host-0] a\n", "", id="windows"),
        pytest.param([(0, 1, b"\r\n")], "[rank 0 host-0] \n", "", id="only-a-return"),
        pytest.param([(0, 1, b"10%\r20%\r30%\n")], "[rank 0 host-0] 30%\n", "", id="bar"),
        pytest.param([(0, 1, b"10%\r\r\r\n")], "[rank 0 host-0] 10%\n", "", id="returns-at-the-end"),
        pytest.param([(0, 1, b"\r10%"), (0, 1, b"\r20%"), (0, 1, b"\n")], "[rank 0 host-0] 20%\n", "", id="bar-pieces"),
        pytest.param([(0, 2, b"\r10%"), (0, 2, b"\r20%")], "", "[rank 0 host-0] 20%\n", id="bar-that-never-ends"),
        pytest.param([(0, 2, b"10%\r"), (0, 2, b"20%\r")], "", "[rank 0 host-0] 20%\n", id="bar-return-last"),
        pytest.param([(0, 2, b"\r10%\r"), (0, 2, b"   \r")], "", "", id="bar-that-takes-itself-away"),
        pytest.param([(0, 2, b"\r10%\r   \rtext\n")], "", "[rank 0 host-0] text\n", id="text-instead-of-a-bar"),
        pytest.param([(0, 2, b"10%\r"), (0, 2, b"   ")], "", "", id="bar-that-is-taken-away-in-pieces"),
    ],
)
def test_whole_lines_with_rank_and_host(capsys, pieces, out, err):
    show(*pieces)
    if out is None:
        out = "[rank 0 host-0] epoch 1\n[rank 0 host-0] 2epoch 1\n[rank 0 host-0] 2\n"
    assert tuple(capsys.readouterr()) == (out, err)


def test_lines_are_shown_as_they_come_and_unfinished_ones_wait(use):
    out = use(Stream)
    console = Console(host_of)
    console.write(0, 1, b"not yet")
    console.write(1, 1, b"first\n")
    out.until("[rank 1 host-1] first\n")
    assert "not yet" not in out.getvalue()
    console.write(0, 1, b" but now\nrest")
    out.until("[rank 0 host-0] not yet but now\n")
    console.close()
    assert out.lines()[-1] == "[rank 0 host-0] rest"


bytes_with_ends = st.lists(st.sampled_from([b"\n", b"\r", b" ", b"a", b"\xc3", b"\xa4", b"\xff"]), max_size=30)


@given(bytes_with_ends.map(b"".join), st.lists(st.integers(0, 30), max_size=5))
def test_pieces_do_not_matter(data, cuts):
    def shown(pieces):
        saved, sys.stdout = sys.stdout, io.StringIO()
        try:
            show(*((0, 1, piece) for piece in pieces))
            return sys.stdout.getvalue()
        finally:
            sys.stdout = saved

    edges = [0, *sorted(cuts), len(data)]
    assert shown(data[start:end] for start, end in itertools.pairwise(edges)) == shown([data])


def test_a_line_without_end_is_shown_at_some_length(use, monkeypatch):
    monkeypatch.setattr(backlog, "_MAX_LINE", 100)
    out = use(Stream)
    console = Console(host_of, limit=10)
    for _ in range(3):
        console.write(0, 1, b"x" * 60)
        console.write(0, 1, b"y" * 60)
        out.until("[rank 0 host-0] " + "x" * 60 + "y" * 60 + "\n")
        out.seek(0)
        out.truncate()
    console.close()
    assert out.getvalue() == ""


def test_all_unfinished_lines_together_are_bounded(use, monkeypatch):
    """The longest is shown, so that others stay whole."""
    monkeypatch.setattr(backlog, "_MAX_LINES", 100, raising=False)
    out = use(Stream)
    console = Console(host_of)
    console.write(0, 1, b"x" * 60)
    console.write(1, 1, b"y" * 30)
    console.write(2, 1, b"z" * 30)
    out.until("[rank 0 host-0] " + "x" * 60 + "\n")
    assert "y" not in out.getvalue()
    console.write(1, 1, b"\n")
    console.skipped(2, 1, 1)
    console.write(0, 1, b"x" * 60)
    console.write(3, 1, b"a" * 39)
    out.until("[rank 1 host-1] " + "y" * 30 + "\n")
    assert console._backlog._partial_size == 99
    console.close()


def test_a_note_of_any_text_is_shown(use):
    out = use(Stream)
    console = Console(host_of)
    console.note("half a \ud800 character")
    console.close()
    assert out.lines() == ["[distributor] half a \\ud800 character"]


def test_runs_without_output_have_no_thread():
    before = display_threads()
    console = Console(host_of, ranks={1})
    console.write(1, 1, b"")
    console.write(0, 1, b"of nobody\n")
    console.skipped(0, 1, 3)
    assert display_threads() == before
    console.close()
    assert display_threads() == before


def test_one_daemon_thread_shows_all_and_ends(use):
    use(Stream)
    before = display_threads()
    console = Console(host_of)
    for rank in range(3):
        console.write(rank, 1, b"line\n")
    (thread,) = set(display_threads()) - set(before)
    assert thread.daemon
    console.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(("ranks", "shown"), [(None, [0, 1, 2]), ({2, 0}, [0, 2]), ([1], [1]), ((), [])])
def test_whose_lines_are_shown(use, ranks, shown):
    out = use(Stream)
    console = Console(host_of, ranks=ranks)
    for rank in range(3):
        console.write(rank, 1, b"a\nb")
        console.skipped(rank, 2, 2)
    console.close()
    for text in ("a", "b", "... 2 lines skipped: the node could not keep up"):
        assert [line for line in out.lines() if line.endswith(f"] {text}")] == [
            f"[rank {rank} host-{rank}] {text}" for rank in shown
        ]


def test_closing_twice_and_writing_later_is_harmless(use):
    out = use(Stream)
    console = Console(host_of)
    console.write(0, 1, b"rest")
    console.close()
    console.close()
    console.write(0, 1, b"late\n")
    console.close()
    assert out.getvalue() == "[rank 0 host-0] rest\n"
    Console(host_of).close()


# ---- Outputs of all kinds


class Broken(Stream):
    """What is at the other end is gone."""

    def write(self, _text):
        raise BrokenPipeError


class Full(Stream):
    def flush(self):
        raise OSError(28, "No space left on device")


class Odd:
    """Not a file at all, as an application may have it."""

    encoding = 3

    def isatty(self):
        raise RuntimeError


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(closed, id="closed"),
        pytest.param(Broken, id="broken-pipe"),
        pytest.param(Full, id="full"),
        pytest.param(Odd, id="odd"),
        # What Python makes of a descriptor that is closed at its start: python train.py >&-
        pytest.param(lambda: None, id="none"),
    ],
)
@pytest.mark.parametrize("fold", [False, True])
def test_output_that_is_gone_is_harmless(use, monkeypatch, stream, fold):
    out, err = use(Stream, Stream)
    console = Console(host_of, fold=fold)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream())
        console.write(0, 1, b"lost\nkept")
        console.write(0, 2, b"mark\n")
        console.write(1, 1, b"\rbar")
        err.until("mark")
    console.write(0, 1, b"\n")
    console.close()
    assert out.lines() == ["[rank 0 host-0] kept", "[rank 1 host-1] bar"]


def test_a_host_that_cannot_be_told_does_not_end_the_display(use):
    out = use(Stream)

    asked = threading.Event()

    def host_of(rank):
        asked.set()
        return {1: "host-1"}[rank]

    console = Console(host_of)
    console.write(0, 1, b"lost\n")
    assert asked.wait(DEADLINE)
    console.write(1, 1, b"kept\n")
    console.close()
    assert out.lines() == ["[rank 1 host-1] kept"]


def test_characters_that_the_output_lacks_do_not_lose_lines(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    show((0, 1, "loss 0.1\nä\n".encode()))
    assert buffer.getvalue() == b"[rank 0 host-0] loss 0.1\n[rank 0 host-0] \\xe4\n"


def test_outputs_are_looked_up_when_something_is_printed(use):
    console = Console(host_of)
    first = use(Stream)
    console.write(0, 1, b"one\n")
    first.until("one")
    second = use(Stream)
    console.write(0, 1, b"two\n")
    console.close()
    assert (first.lines(), second.lines()) == (["[rank 0 host-0] one"], ["[rank 0 host-0] two"])


def test_prefixes_on_terminals_have_one_of_six_colours(use):
    out, err = use(Terminal, Stream)
    show(*((rank, stream, b"a\nb\n") for rank in range(7) for stream in (1, 2)))
    found = re.findall(r"^\x1b\[(3\d)m\[rank (\d) host-\2\]\x1b\[0m (a|b)$", out.getvalue(), re.MULTILINE)
    assert [(int(rank), text) for _, rank, text in found] == [(rank, text) for rank in range(7) for text in "ab"]
    colours = {int(rank): colour for colour, rank, _ in found}
    assert len({colours[rank] for rank in range(6)}) == 6
    assert colours[6] == colours[0]
    assert "\x1b" not in err.getvalue()


@pytest.mark.parametrize(("value", "coloured"), [("1", False), ("", True)])
def test_no_color_is_respected(use, monkeypatch, value, coloured):
    monkeypatch.setenv("NO_COLOR", value)
    out = use(Terminal)
    console = Console(host_of)
    console.write(1, 1, b"text\n\rbar")
    out.until("bar")
    console.close()
    assert (re.search(r"\x1b\[\d+m", out.getvalue()) is not None) is coloured


def test_notebooks_have_no_escapes(use):
    out = use(Notebook)
    console = Console(host_of)
    console.write(1, 1, b"text\n\rbar")
    out.until("bar")
    console.close()
    assert "\x1b" not in out.getvalue()
    assert out.screen() == ["[rank 1 host-1] text", "[rank 1 host-1] bar", ""]


# ---- What the display cannot take


def account(text, written):
    """Checks that what is shown and what is skipped is, in order, all that ranks have written: numbered lines."""
    following = dict.fromkeys(written, 0)
    for line in text.splitlines():
        if gap := SKIPPED.fullmatch(line):
            following[int(gap[1])] += int(gap[2].replace(",", ""))
        else:
            rank, number = re.fullmatch(r"\[rank (\d+) host-\1\] line (\d+)x*", line).groups()
            assert following[int(rank)] == int(number)
            following[int(rank)] += 1
    assert following == written
    return sum(int(gap[2].replace(",", "")) for gap in SKIPPED.finditer(text))


def numbered(start, count):
    return b"".join(b"line %d\n" % number for number in range(start, start + count))


def test_a_blocked_output_blocks_nobody_and_memory_is_bounded(use):
    limit, count = 1 << 20, 2000  # 200 MB
    piece = b"".join(b"line %d" % number + b"x" * 1000 + b"\n" for number in range(100))
    out = use(Gate)
    console = Console(host_of, limit=limit)
    console.write(0, 1, b"line 0\n")
    assert out.stuck.wait(DEADLINE)
    tracemalloc.start()
    try:
        for number in range(count):
            console.write(number % 4, 1, piece)
            console.skipped(5, 2, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert console._backlog.size <= limit
    assert peak < 2 * limit
    out.open.set()
    console.close()
    shown = len(re.findall(r"\] line \d+x+$", out.getvalue(), re.MULTILINE))
    skipped = sum(int(gap[2].replace(",", "")) for gap in SKIPPED.finditer(out.getvalue()) if gap[3] == "display")
    assert skipped > 0.9 * count * 100
    assert shown + skipped == count * 100
    assert f"... {count:,} lines skipped: the node could not keep up" in out.getvalue()


def test_a_gap_is_one_until_half_of_the_room_is_free(use):
    out = use(Gate)
    console = Console(host_of, limit=10_000)
    console.write(0, 1, b"first\n")
    assert out.stuck.wait(DEADLINE)
    for size in (8000, 3000, 1, 1):
        console.write(0, 1, b"x" * size + b"\n")
    out.open.set()
    console.close()
    assert out.lines() == [
        "[rank 0 host-0] first",
        "[rank 0 host-0] " + "x" * 8000,
        "[rank 0 host-0] ... 1 line skipped: the display could not keep up",
        "[rank 0 host-0] x",  # the last of those that there was no room for
        "[rank 0 host-0] x",
    ]


def test_tiny_pieces_are_bounded_too(use):
    limit = 1 << 20
    out = use(Gate)
    console = Console(host_of, limit=limit)
    console.write(0, 1, b"\n")
    assert out.stuck.wait(DEADLINE)
    tracemalloc.start()
    try:
        for number in range(50_000):
            console.write(number % 100, 1, b"\n")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * limit
    out.open.set()
    console.close()


def test_a_note_on_skipped_lines_stands_in_their_place(use):
    """Lines before, a gap, lines after; and a gap that nothing follows is said as soon as there is room."""
    out = use(Gate)
    console = Console(host_of, limit=10_000)
    console.write(0, 1, numbered(0, 10))
    assert out.stuck.wait(DEADLINE)
    written = {0: 10, 1: 0}
    for rank, count in [(0, 10), (1, 20_000), (0, 20_000), (1, 10), (0, 10), (0, 20_000)]:
        console.write(rank, 1, numbered(written[rank], count))
        written[rank] += count
    console.write(0, 1, b"line %d" % written[0])  # unfinished, and complete later
    out.open.set()
    out.until("[rank 0 host-0] line 40029\n")
    console.write(0, 1, b"\n" + numbered(written[0] + 1, 4))
    console.close()
    written[0] += 5
    assert 59_000 < account(out.getvalue(), written) < 60_000
    who = r"\[rank 0 host-0\]"
    gap = rf"line 20029\n{who} \.\.\. 19,9\d\d lines skipped: the display could not keep up\n{who} line 399\d\d\n"
    assert re.search(gap, out.getvalue())
    assert "[rank 0 host-0] line 40029\n[rank 0 host-0] line 40030\n" in out.getvalue()


class Slow(Stream):
    """Takes 20,000 lines a second."""

    def write(self, text):
        time.sleep(text.count("\n") / 20_000)
        return super().write(text)


def test_a_display_that_is_too_slow_shows_the_end(use):
    out = use(Slow)
    console = Console(host_of)
    written = {0: 0}
    for _ in range(100):
        console.write(0, 1, numbered(written[0], 1000))
        written[0] += 1000
    console.note("the end")
    console.close(timeout=1.0)
    out.until("[distributor] the end")
    lines = out.lines()
    assert account("\n".join(lines[:-1]) + "\n", written) > 10_000
    assert lines[-1] == "[distributor] the end"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.booleans()), max_size=40))
def test_shown_and_skipped_is_what_was_written(writes):
    """Whenever the display can take something, and how much."""
    saved, sys.stdout = sys.stdout, Gate()
    try:
        out = sys.stdout
        console, written = Console(host_of, limit=3000), dict.fromkeys(range(3), 0)
        for rank, count, is_open in writes:
            out.open.set() if is_open else out.open.clear()
            data = numbered(written[rank], count)
            cut = len(data) // 3
            console.write(rank, 1, data[:cut])
            console.write(rank, 1, data[cut:])
            written[rank] += count
        out.open.set()
        console.close()
        account(out.getvalue(), written)
    finally:
        sys.stdout = saved


def test_a_block_longer_than_the_limit_is_shown_if_nothing_waits(use):
    out = use(Stream)
    show((0, 1, numbered(0, 1000)), limit=100)
    assert account(out.getvalue(), {0: 1000}) == 0


def test_closing_does_not_wait_for_a_blocked_output_for_ever(use):
    out = use(Gate)
    console = Console(host_of)
    console.write(0, 1, b"a\nb")
    assert out.stuck.wait(DEADLINE)
    start = time.monotonic()
    console.close(0.1)
    assert time.monotonic() - start < DEADLINE / 2
    assert out.getvalue() == ""
    out.open.set()
    console.close()
    assert out.lines() == ["[rank 0 host-0] a", "[rank 0 host-0] b"]


def test_a_note_on_lines_that_a_node_skipped_stands_in_their_place(use):
    out = use(Stream)
    console = Console(host_of)
    console.write(0, 1, b"before\nunfinished")
    console.write(0, 2, b"other")
    console.write(1, 1, b"\rbar")
    console.skipped(0, 1, 12_345)
    console.skipped(1, 1, 1)
    console.skipped(1, 2, 0)
    console.write(0, 1, b"after\n")
    console.close()
    assert [line for line in out.lines() if line.startswith("[rank 0 ")] == [
        "[rank 0 host-0] before",
        "[rank 0 host-0] ... 12,345 lines skipped: the node could not keep up",
        "[rank 0 host-0] after",
        "[rank 0 host-0] other",
    ]
    assert [line for line in out.lines() if line.startswith("[rank 1 ")] == [
        "[rank 1 host-1] ... 1 line skipped: the node could not keep up"
    ]


# ---- Progress bars


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_a_bar_is_one_live_line_below_the_others(use, kind):
    out = use(kind)
    console = Console(host_of)
    console.write(0, 2, b"\r10% and long")
    out.until("10%")
    assert out.screen() == ["[rank 0 host-0] 10% and long"]
    console.write(0, 2, b"\r20%")
    out.until("20%")
    assert out.screen() == ["[rank 0 host-0] 20%"]
    for number, text in enumerate(["one", "two, which is longer than the bar is", "3"]):
        console.write(1, 1, f"\r{text}\n\r{number}".encode())
        out.until(f"{text}\n")
    console.write(0, 2, b"\r30%")
    out.until("30%")
    lines = ["[rank 1 host-1] one", "[rank 1 host-1] two, which is longer than the bar is", "[rank 1 host-1] 3"]
    assert out.screen() == [*lines, "[rank 0 host-0] 30%"]
    console.write(0, 2, b"\r40%\n\r")
    console.close()
    assert out.screen() == [*lines, "[rank 0 host-0] 40%", "[rank 1 host-1] 2", ""]


def test_of_several_bars_the_lowest_rank_is_shown(use):
    out = use(Terminal)
    console = Console(host_of)
    console.write(2, 1, b"\rtwo")
    out.until("two")
    console.write(1, 1, b"\rone")
    out.until("one")
    assert out.screen() == ["[rank 1 host-1] one"]
    console.write(2, 1, b"\rTWO")
    console.write(1, 1, b"\r   \r")  # it takes itself away
    out.until("TWO")
    assert out.screen() == ["[rank 2 host-2] TWO"]
    console.write(2, 1, b"!")
    out.until("TWO!")
    console.write(2, 1, b"\nno bar")
    out.until("TWO!\n")
    console.write(1, 1, b"\rone")
    out.until("one\x1b[K")
    console.skipped(1, 1, 1)
    out.until("1 line skipped")
    console.write(3, 1, b"line\n")
    out.until("line\n")
    lines = [
        "[rank 2 host-2] TWO!",
        "[rank 1 host-1] ... 1 line skipped: the node could not keep up",
        "[rank 3 host-3] line",
    ]
    assert out.screen() == [*lines, ""]
    console.close()
    assert out.screen() == [*lines, "[rank 2 host-2] no bar", ""]


def test_a_bar_on_stderr_lives_beside_a_file_on_stdout(use):
    out, err = use(Stream, Terminal)
    console = Console(host_of)
    console.write(0, 2, b"\r10%")
    err.until("10%")
    console.write(0, 1, b"line\n")
    out.until("line")
    console.write(0, 1, b"\rbar of a file")
    console.write(0, 2, b"\r20%")
    err.until("20%")
    assert err.getvalue().count("\x1b[K") == 2  # nothing had to be erased
    console.close()
    assert out.lines() == ["[rank 0 host-0] line", "[rank 0 host-0] bar of a file"]
    assert err.screen() == ["[rank 0 host-0] 20%", ""]


def test_two_terminals_keep_one_live_line(use):
    out, err = use(Terminal, Terminal)
    console = Console(host_of)
    console.write(1, 1, b"\rone")
    out.until("one")
    console.write(0, 2, b"\rzero")
    err.until("zero")
    assert out.screen() == [""]
    console.write(2, 1, b"line\n\r")
    out.until("line\n")
    console.write(0, 2, b"\rZERO")
    err.until("ZERO")
    assert err.screen() == ["[rank 0 host-0] ZERO"]
    console.close()


@pytest.mark.parametrize(
    ("bar", "width", "seen"),
    [
        pytest.param("x" * 100, 40, "x" * 23, id="long"),
        pytest.param("日本語日本語", 21, "日本", id="wide"),
        pytest.param("x", 10, None, id="narrower-than-the-prefix"),
        pytest.param("\x1b[32m50%\x1b[0m\x1b[A", 80, "50%", id="colours-and-moves"),
    ],
)
def test_a_live_line_is_one_line_of_the_terminal(use, monkeypatch, bar, width, seen):
    monkeypatch.setenv("COLUMNS", str(width))
    assert shutil.get_terminal_size().columns == width
    out = use(Terminal)
    console = Console(host_of)
    console.write(0, 1, b"\r" + bar.encode())
    out.until("\x1b[K")
    (line,) = out.screen()
    assert line == (f"[rank 0 host-0] {seen}" if seen is not None else "[rank 0 h")
    console.close()


def test_redraws_are_thinned(use):
    out = use(Terminal)
    console = Console(host_of)
    start = time.monotonic()
    for number in range(20_000):
        console.write(0, 1, b"\r%d" % number)
        if number % 100 == 0:
            console.write(1, 1, b"line\n")
    console.close()
    elapsed = time.monotonic() - start
    assert out.screen() == ["[rank 1 host-1] line"] * 200 + ["[rank 0 host-0] 19999", ""]
    assert len(re.findall(r"\d\x1b\[K", out.getvalue())) <= elapsed / module._REDRAW + 2


@pytest.mark.parametrize("fold", [False, True])
def test_states_of_bars_are_rare_lines_in_files(use, monkeypatch, fold):
    monkeypatch.setattr(printing, "_BAR_LINES", NEVER)
    out, err = use(Stream, Stream)
    console = Console(host_of, fold=fold, world_size=2)
    for number in range(1000):
        console.write(0, 1, b"\r%d" % number)
        console.write(0, 2, b"\rerr %d" % number)
    console.write(0, 1, b"\rend\n")
    console.close()
    assert out.lines() == ["[rank 0 host-0] end"]
    assert err.lines() == ["[rank 0 host-0] err 999"]


@pytest.mark.parametrize("fold", [False, True])
def test_the_newest_state_of_a_bar_is_a_line_now_and_then(use, monkeypatch, fold):
    monkeypatch.setattr(printing, "_BAR_LINES", 0.2)
    out = use(Stream)
    console = Console(host_of, fold=fold, world_size=2)
    console.write(0, 1, b"line\n\r10%\r20%")
    out.until("20%")  # though nothing else comes
    console.write(0, 1, b"\r  ")
    console.write(1, 1, b"\rother")
    out.until("other")
    console.write(0, 1, b"\r30%")
    out.until("30%")
    console.write(0, 1, b"\r40%\n")
    console.close()
    assert [line for line in out.lines() if line.startswith("[rank 0 ")] == [
        f"[rank 0 host-0] {text}" for text in ("line", "20%", "30%", "40%")
    ]


def test_a_bar_that_stands_still_is_said_once(use, monkeypatch):
    monkeypatch.setattr(printing, "_BAR_LINES", 0.0)
    out = use(Stream)
    console = Console(host_of)
    console.write(0, 1, b"\r10%")
    out.until("10%")
    for number in range(5):  # of another stream: the display goes round
        console.write(1, 1, b"%d\n" % number)
        out.until(f"{number}\n")
    console.skipped(0, 1, 1)
    console.close()
    assert out.getvalue().count("10%") == 1


def test_a_bar_may_go_on_for_days(use, monkeypatch):
    monkeypatch.setattr(backlog, "_MAX_LINE", 1000)
    out = use(Stream)
    console = Console(host_of)
    for number in range(1000):
        console.write(0, 1, b"\r%d" % number + b"x" * 100)
        assert len(console._backlog._partial[0, 1]) < 300
    console.close()
    assert out.lines() == ["[rank 0 host-0] 999" + "x" * 100]


# ---- Folding


def said_by(text):
    """Each rank's lines in order."""
    said = {}
    for line in text.splitlines():
        ranks, several, line = re.fullmatch(r"\[(?:rank (\d+) host-\d+|ranks ([\d, -]+))\] (.*)", line).groups()
        for part in (ranks or several).split(", "):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                said.setdefault(rank, []).append(line)
    return said


@pytest.mark.parametrize(
    ("ranks", "prefix"),
    [(range(16), "[ranks 0-15]"), ([5, 2, 0, 1], "[ranks 0-2, 5]"), ([4, 3], "[ranks 3-4]"), ([7], "[rank 7 host-7]")],
)
def test_equal_lines_become_one_without_a_wait_when_all_have_said_it(use, monkeypatch, ranks, prefix):
    monkeypatch.setattr(printing, "_FOLD_WAIT", NEVER)
    out = use(Terminal)
    console = Console(host_of, ranks=ranks, fold=True, world_size=1000)
    for rank in ranks:
        console.write(rank, 1, b"epoch 1\nep")
    out.until("epoch 1\n")
    for rank in ranks:
        console.write(rank, 1, b"och 2\n")
    out.until("epoch 2\n")
    console.close()
    assert out.screen() == [f"{prefix} epoch 1", f"{prefix} epoch 2", ""]
    assert ("\x1b" in out.getvalue()) is (len(ranks) == 1)


def test_all_is_the_world_if_all_are_shown(use, monkeypatch):
    monkeypatch.setattr(printing, "_FOLD_WAIT", NEVER)
    out = use(Stream)
    console = Console(host_of, fold=True, world_size=3)
    for rank in range(3):
        console.write(rank, 1, b"same\n")
    out.until("[ranks 0-2] same\n")
    console.write(0, 1, b"alone\n")
    console.close()
    assert out.lines() == ["[ranks 0-2] same", "[rank 0 host-0] alone"]


def test_lines_wait_for_their_equals_only_so_long(use, monkeypatch):
    monkeypatch.setattr(printing, "_FOLD_WAIT", 0.3)
    out = use(Stream)
    console = Console(host_of, fold=True, world_size=3)
    start = time.monotonic()
    with console._changed:  # both at once for the display
        console.write(0, 1, b"hello\n")
        console.write(2, 1, b"hello\n")
    out.until("[ranks 0, 2] hello\n")
    assert time.monotonic() - start >= 0.3
    console.write(1, 1, b"hello\n")
    out.until("[rank 1 host-1] hello\n")
    console.close()


def test_lines_of_both_streams_are_apart_and_repeated_lines_stay(use, monkeypatch):
    monkeypatch.setattr(printing, "_FOLD_WAIT", NEVER)
    out, err = use(Stream, Stream)
    console = Console(host_of, fold=True, world_size=2)
    console.write(0, 1, b"again\nagain\nagain\n")
    console.write(0, 2, b"again\n")
    console.write(1, 2, b"again\n")
    console.write(1, 1, b"again\nagain\n")
    console.close()
    assert out.lines() == ["[ranks 0-1] again", "[ranks 0-1] again", "[rank 0 host-0] again"]
    assert err.lines() == ["[ranks 0-1] again"]


def test_gaps_are_folded_in_their_place(use, monkeypatch):
    monkeypatch.setattr(printing, "_FOLD_WAIT", NEVER)
    out = use(Stream)
    console = Console(host_of, fold=True, world_size=2)
    for rank in range(2):
        console.write(rank, 1, b"before\n")
        console.skipped(rank, 1, 5)
        console.write(rank, 1, b"after\n")
    console.close()
    texts = ["before", "... 5 lines skipped: the node could not keep up", "after"]
    assert out.lines() == [f"[ranks 0-1] {text}" for text in texts]


def test_lines_that_wait_are_bounded(use, monkeypatch):
    monkeypatch.setattr(printing, "_FOLD_WAIT", NEVER)
    out = use(Stream)
    console = Console(host_of, fold=True, world_size=2, limit=100_000)
    console.write(0, 1, numbered(0, 1000))
    out.until("line 700\n")
    assert "line 999\n" not in out.getvalue()
    console.close()
    assert said_by(out.getvalue()) == {0: [f"line {number}" for number in range(1000)]}


words = st.sampled_from(["a", "b", "c", ""])


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([1, 2]), st.lists(words, min_size=1, max_size=6)), max_size=30
    ),
    st.sampled_from([0.0, 1e-4, NEVER]),
    st.sampled_from([0, 3000, 8 << 20]),
)
def test_folding_keeps_each_ranks_lines_and_their_order(writes, wait, fold_limit):
    saved = sys.stdout, sys.stderr, printing._FOLD_WAIT
    sys.stdout, sys.stderr, printing._FOLD_WAIT = out, err, _ = Stream(), Stream(), wait
    try:
        console = Console(host_of, fold=True, world_size=4)
        console._printer._fold._limit = fold_limit
        expected = {1: {}, 2: {}}
        for rank, stream, lines in writes:
            console.write(rank, stream, "".join(f"{line}\n" for line in lines).encode())
            expected[stream].setdefault(rank, []).extend(lines)
        console.close()
    finally:
        sys.stdout, sys.stderr, printing._FOLD_WAIT = saved
    assert {1: said_by(out.getvalue()), 2: said_by(err.getvalue())} == expected


def test_equal_lines_are_folded_however_far_apart_they_are(use, monkeypatch):
    monkeypatch.setattr(printing, "_FOLD_WAIT", NEVER)
    out = use(Stream)
    console = Console(host_of, fold=True, world_size=3)
    for rank in range(3):
        console.write(rank, 1, numbered(0, 500))
    console.close()
    assert out.lines() == [f"[ranks 0-2] line {number}" for number in range(500)]


#: A title, a clipboard, a cleared screen, and a colour.
STRANGE = b"\x1b]0;title\x07\x1b]52;c;aGVs\x1b\\\x1b[2J\x1b[31mloss\x1b[0m 0.5\n"


@pytest.mark.parametrize("kind", [Stream, Terminal, Notebook])
@pytest.mark.parametrize("fold", [False, True])
def test_of_escape_sequences_only_colours_are_shown(use, kind, fold):
    out = use(kind)
    show((0, 1, STRANGE[:5]), (0, 1, STRANGE[5:]), fold=fold, prefix=False)
    assert out.getvalue() == "\x1b[31mloss\x1b[0m 0.5\n"


@pytest.mark.parametrize("fold", [False, True])
def test_all_escape_sequences_are_shown_where_they_are_wanted(use, fold):
    out = use(Terminal)
    show((0, 1, STRANGE), fold=fold, prefix=False, escapes=True)
    assert out.getvalue() == STRANGE.decode()


def test_the_distributors_own_lines_pass_on_no_escape_sequences(use):
    """They may quote what a rank has raised."""
    out = use(Terminal)
    console = Console(host_of, escapes=True)
    console.note("rank 0 failed: \x1b]0;title\x07no")
    console.close()
    assert out.getvalue() == "[distributor] rank 0 failed: no\n"


@pytest.mark.parametrize("escapes", [False, True])
def test_a_bar_has_no_escape_sequences(use, escapes):
    out = use(Terminal)
    console = Console(host_of, prefix=False, escapes=escapes)
    console.write(0, 2, b"\r\x1b]0;title\x07\x1b[1A\x1b[32m50 %")
    out.until("50 %")
    assert "title" not in out.getvalue()
    assert "\x1b[1A" not in out.getvalue()
    console.write(0, 2, b"\r")
    console.close()


def test_what_was_shown_takes_no_room_whatever_was_skipped():
    waiting = backlog.Backlog(1000)
    key = (0, 1)
    for number in range(100):
        waiting.write(key, b"x" * 400 + b"\n")
        waiting.note("n\u00f6te")
        if number % 10 == 9:
            while waiting:
                _, size = waiting.take()
                waiting.size -= size
            assert waiting.size == 0
