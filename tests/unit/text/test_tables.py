"""Tables as text."""

from __future__ import annotations

from distributor.text.tables import table


def test_columns_are_aligned_by_what_a_terminal_shows() -> None:
    assert table(["name", "seconds"], [["数字", "3"], ["digits", "五"]]).splitlines() == [
        "name    seconds",
        "数字          3",
        "digits       五",
    ]
