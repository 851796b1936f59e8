"""Identical lines of several ranks, merged."""

from __future__ import annotations

from distributor.display.folding import OVERHEAD, Fold

LATE = float("inf")


def left(fold: Fold, until: float) -> list[tuple[list[int], str]]:
    return [(entry.ranks, entry.text) for entry in fold.leave(until)]


def test_a_line_that_all_ranks_have_written_leaves_at_once() -> None:
    fold = Fold(2, 1 << 20)
    fold.add(0, 1, "epoch 1", now=5.0)
    assert left(fold, until=4.0) == []
    fold.add(1, 1, "epoch 1", now=6.0)
    assert left(fold, until=4.0) == [([0, 1], "epoch 1")]
    assert not fold.entries


def test_a_ranks_lines_stay_in_order_and_repeated_ones_apart() -> None:
    fold = Fold(2, 1 << 20)
    for rank, text in ((0, "a"), (0, "b"), (0, "a"), (1, "a"), (1, "a"), (1, "b")):
        fold.add(rank, 1, text, now=1.0)
    assert left(fold, LATE) == [([0, 1], "a"), ([0], "b"), ([0, 1], "a"), ([1], "b")]


def test_streams_are_not_mixed() -> None:
    fold = Fold(2, 1 << 20)
    fold.add(0, 1, "same", now=1.0)
    fold.add(1, 2, "same", now=1.0)
    assert left(fold, LATE) == [([0], "same"), ([1], "same")]


def test_too_much_waiting_text_makes_the_oldest_leave() -> None:
    fold = Fold(2, 2 * OVERHEAD)
    for number in range(3):
        fold.add(0, 1, str(number), now=5.0)
    assert left(fold, until=0.0) == [([0], "0"), ([0], "1")]
