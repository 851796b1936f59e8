"""How numbers, ranks, sizes and times are told, and sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from distributor.text.wording import count, duration, mebibytes, parse_memory, ranges, size, who


def test_ranges():
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 1, 2, 5]) == "0-2, 5"
    assert ranges(range(4)) == "0-3"
    assert ranges([2, 0, 7, 1]) == "0-2, 7"


@given(st.sets(st.integers(0, 40)))
def test_ranges_tell_all_ranks(ranks):
    spans = [span.split("-") for span in ranges(list(ranks)).split(", ") if span]
    assert [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)] == sorted(ranks)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0.0 s"), (0.04, "40 ms"), (9.94, "9.9 s"), (59.9, "59 s"), (60, "1 min 00 s"), (86400, "24 h 00 min")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        *(
            (0, "0 bytes"),
            (1, "1 byte"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            (10 << 10, "10 KiB"),
            (1536 << 10, "1.5 MiB"),
        ),
        *((300 << 20, "300 MiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB"), (5000 << 40, "5,000 TiB")),
    ],
)
def test_sizes(number: int, words: str) -> None:
    assert size(number) == words


def test_counts() -> None:
    assert [count(number, "rank") for number in (0, 1, 2, 2048)] == ["0 ranks", "1 rank", "2 ranks", "2,048 ranks"]
    assert (count(1, "process"), count(2, "process")) == ("1 process", "2 processes")
    assert (who([3]), who(range(2))) == ("rank 3", "ranks 0-1")
    assert mebibytes(3 << 30) == "3,072 MiB"


@pytest.mark.parametrize(
    ("text", "unit", "size"),
    [
        ("8g", "", 8 << 30),
        ("512 MB", "", 512 << 20),
        ("1.5k", "", 1536),
        ("1GiB", "", 1 << 30),
        ("2", "m", 2 << 20),
        ("7b", "m", 7),
        ("7", "", 7),
    ],
)
def test_sizes_that_people_write(text: str, unit: str, size: int) -> None:
    assert parse_memory(text, unit) == size


@pytest.mark.parametrize("text", ["", "g", "-1g", "8 gigs", "1e9"])
def test_texts_that_are_no_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_memory(text)
