"""Which values of several ranks trackers get, in whatever order their reports come."""

from hypothesis import given, strategies as some

from distributor.metrics.table import Row
from distributor.tracking.lowest import LowestRank


def values(rows):
    return [(row.rank, row.step, dict(row.values)) for row in rows]


def row(rank, step, time=0.0, attempt=0, **values):
    return Row(attempt, step, time, rank, values)


def test_a_higher_ranks_values_wait_however_late_rank_0_comes():
    lowest = LowestRank()
    for step in range(3):
        assert lowest.choose([row(1, step, time=step, loss=1.0)]) == []
    assert values(lowest.choose([row(0, 0, loss=0.0), row(0, 1, loss=0.0)])) == [
        (0, 0, {"loss": 0.0}),
        (0, 1, {"loss": 0.0}),
    ]
    assert lowest.choose([], last=True) == []


def test_a_name_that_rank_0_does_not_report_goes_once_rank_0_is_further():
    lowest = LowestRank()
    assert lowest.choose([row(3, 5, loss=1.0), row(0, 5, rate=1.0)])[0].rank == 0  # which may report more for step 5
    assert values(lowest.choose([row(0, 6, rate=1.0)])) == [(3, 5, {"loss": 1.0}), (0, 6, {"rate": 1.0})]
    assert values(lowest.choose([row(3, 7, loss=1.0)])) == [(3, 7, {"loss": 1.0})]


def test_a_name_goes_ten_seconds_later_if_rank_0_reports_nothing():
    lowest = LowestRank()
    assert lowest.choose([row(3, None, time=100.0, loss=1.0)]) == []
    assert lowest.choose([row(3, None, time=109.0, loss=2.0)]) == []
    assert len(lowest.choose([row(3, None, time=110.0, loss=3.0)])) == 3


def test_ranks_are_chosen_anew_in_the_next_attempt_and_nothing_of_the_last_one_is_lost():
    lowest = LowestRank()
    assert lowest.choose([row(1, 1, loss=1.0)]) == []
    assert values(lowest.choose([row(2, 2, attempt=1, loss=2.0)])) == [(1, 1, {"loss": 1.0})]
    assert values(lowest.choose([], last=True)) == [(2, 2, {"loss": 2.0})]


@given(
    some.lists(some.tuples(some.integers(0, 2), some.sampled_from("ab")), max_size=20), some.lists(some.integers(1, 5))
)
def test_no_value_of_the_lowest_rank_is_lost_and_none_comes_twice(reports, sizes):
    rows = [row(rank, step, **{name: float(rank)}) for step, (rank, name) in enumerate(reports)]
    lowest, chosen, left = LowestRank(), [], rows
    for size in sizes:
        chosen += lowest.choose(left[:size])
        left = left[size:]
    chosen += lowest.choose(left, last=True)
    told = [(each.step, name) for each in chosen for name in each.values]
    assert len(told) == len(set(told))
    for each in rows:
        for name in each.values:
            if each.rank == min(other.rank for other in rows if name in other.values):
                assert (each.step, name) in told
