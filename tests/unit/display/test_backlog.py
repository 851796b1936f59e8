"""What waits to be shown, where the display is slow."""

from __future__ import annotations

import re

from distributor.display.backlog import Backlog


def test_a_display_that_is_too_slow_shows_the_end_last() -> None:
    backlog = Backlog(1 << 20)
    for number in range(20_000):
        backlog.write((0, 1), b"line %05d of the output, with some text\n" % number)
    backlog.trim()
    shown = b""
    while True:
        blocks, size = backlog.take()
        shown += b"".join(block for _, block in blocks)
        backlog.size -= size
        if not backlog:
            break
    numbers = [int(found) for found in re.findall(rb"line (\d{5}) of", shown)]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 19_999
    assert shown.count(b"the display could not keep up") == 2  # before what was kept, and before the end


def test_an_unfinished_line_ends_where_others_go_on() -> None:
    backlog = Backlog(1 << 20)
    backlog.write((0, 1), b"loss 0.5\nresu")
    backlog.write((1, 2), b"10 %\r37 %")
    backlog.end_lines()
    backlog.write((0, 1), b"begins again\n")
    assert backlog.bars() == {} and not backlog.finish()
    assert [block for _, block in backlog.take()[0]] == [b"loss 0.5\n", b"resu\n", b"\r37 %\n", b"begins again\n"]
