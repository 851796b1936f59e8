"""Escape sequences of ranks: colours stay, everything else goes with its text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from distributor.text import escapes

SEQUENCES = [
    pytest.param("\x1b]0;a title\x07", "", id="title"),
    pytest.param("\x1b]52;c;aGVsbG8=\x1b\\", "", id="clipboard"),
    pytest.param("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link", id="link"),
    pytest.param("\x1b]1337;File=:AAAA\nBBBB\nCC\x07", "", id="over-lines"),
    pytest.param("\x1b]0;no end", "", id="no-end"),
    pytest.param("\x1b]0;no end\nloss", "\nloss", id="no-end-on-its-line"),
    pytest.param("\x1bP1$r0m\x1b\\", "", id="device-control"),
    pytest.param("\x1bPtmux;\x1b\x1b]52;c;AAAA\x07\x1b\\", "", id="through-tmux"),
    pytest.param("\x1b_application\x1b\\\x1b^privacy\x1b\\\x1bXstring\x1b\\", "", id="other-strings"),
    pytest.param("\x9d0;a title\x9c\x9b2J\x90q\x9c", "", id="8-bit"),
    pytest.param("\x1b[2J\x1b[H\x1b[1A\x1b[K\x1b[?25l\x1b[?1049h\x1b[6n\x1b[c", "", id="cursor-and-screen"),
    pytest.param("\x1b[>4;2m\x1b[?4m", "", id="no-colours-although-m"),
    pytest.param("\x1bc\x1b7\x1b8\x1bM\x1b(0\x1b#8\x1b=", "", id="short"),
    pytest.param("\x05\x0e\x0f", "", id="answer-and-character-set"),
    pytest.param("loss\x1b", "loss", id="lonely"),
    pytest.param("loss\x1b[3", "loss", id="unfinished"),
    pytest.param("tab\tbar\rback\b é 漢 \U0001f600", "tab\tbar\rback\b é 漢 \U0001f600", id="text"),
]
COLOURS = ["\x1b[31m", "\x1b[0m", "\x1b[m", "\x1b[1;38;5;208m", "\x1b[38:2::255:0:0m", "\x1b[4:3m"]


@pytest.mark.parametrize(("text", "left"), SEQUENCES)
def test_sequences_are_removed_with_their_text(text: str, left: str) -> None:
    assert escapes.colours(text) == escapes.plain(text) == left


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_stay(colour: str) -> None:
    assert escapes.colours(f"\x1b]0;t\x07{colour}loss\x1b[2K") == f"{colour}loss"
    assert escapes.colours(f"é\x9b{colour[2:]}") == f"é{colour}"
    assert escapes.plain(f"{colour}loss") == "loss"


pieces = st.sampled_from(
    ["\x1b", "[", "]", "0;", "31", "m", "\x07", "\\", "P", "\x9b", "\x9d", "\n", "a", " ", "é", "\x0e"]
)


@given(st.lists(pieces, max_size=20).map("".join))
def test_only_colours_are_left(text: str) -> None:
    left = escapes.colours(text)
    assert not re.search(r"[\x1b\x05\x0e\x0f\x80-\x9f]", re.sub(r"\x1b\[[0-9;:]*m", "", left))
    assert escapes.colours(left) == left
    assert escapes.plain(left) == escapes.plain(text)


@given(st.text(st.characters(blacklist_categories=["Cc", "Cs"])))
def test_text_is_left_alone(text: str) -> None:
    assert escapes.colours(text) == escapes.plain(text) == text
    assert escapes.open_end(text) == ""


@pytest.mark.parametrize(("text", "left"), SEQUENCES)
def test_a_sequence_that_is_cut_in_two_is_recognised(text: str, left: str) -> None:
    if "\n" in text:
        pytest.skip("a string without an end goes to the end of its line")
    for place in range(len(text) + 1):
        first, second = text[:place], text[place:]
        shown = escapes.plain(first) + escapes.plain(escapes.open_end(first) + second)
        assert shown == left
        assert len(escapes.open_end(first)) <= 64


@pytest.mark.parametrize("again", ["\x1b\x1b]", "\x1b\x1b", "\x1b[", "\x1b[;", "\x9d"])
def test_an_open_sequence_is_found_in_the_time_of_one_pass(again: str) -> None:
    """Ranks may write anything: a search from each place would take minutes, and the driver would show nothing."""
    assert escapes.open_end("\x1b]" + again * 200_000 + "\x07\x1b[3") == "\x1b[3"


def test_the_end_of_a_text_cuts_no_colour_in_two() -> None:
    text = "a" * 10 + "\x1b[1;31m" + "b" * 10
    assert {escapes.end_of(text, most) for most in range(10, 17)} == {"b" * 10}
    assert escapes.end_of(text, 17) == "\x1b[1;31m" + "b" * 10
