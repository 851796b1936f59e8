"""The order of rows: equal batches, no row twice, the same global batches for every number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distributor.data.row_order import Permutation, RowOrder, check_batch, hashed, lanes_of, unit_rows, window_rows
from distributor.errors import ConfigurationError

CASES = 10_000


@st.composite
def plans(draw, **fixed):
    lanes = draw(st.sampled_from([1, 2, 3, 4, 6, 12, 48]))
    per_lane = draw(st.integers(1, 5))
    values = {
        "rows": draw(st.integers(1, 400)),
        "unit": draw(st.integers(1, 40)),
        "lanes": lanes,
        "per_lane": per_lane,
        "window": per_lane * draw(st.integers(1, 6)),
        "seed": draw(st.integers(0, 2**63)),
        "epoch": draw(st.integers(0, 1000)),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
    }
    return RowOrder(**{**values, **fixed})


def check_an_epoch(plan):
    taken, valid = zip(*(whole(plan, lane) for lane in range(plan.lanes)))
    taken, valid = np.stack(taken), np.stack(valid)  # a row for each lane
    assert taken.shape == (plan.lanes, plan.steps * plan.per_lane), "batches have different sizes"
    if plan.steps:
        step = plan.seed % plan.steps
        batch = taken[:, step * plan.per_lane : (step + 1) * plan.per_lane]
        assert plan.batch(step).tolist() == batch.reshape(-1).tolist()
        assert 0 <= taken.min() and taken.max() < plan.rows
    if plan.drop_last:
        assert len(np.unique(taken)) == taken.size, "a row twice"
        assert plan.rows - taken.size < plan.lanes * plan.per_lane + plan.lanes, "too many rows are left out"
    else:
        assert np.sort(taken[valid]).tolist() == list(range(plan.rows)), "each row once"


def whole(plan, lane):
    """A lane's rows in their order, window after window, and which are valid."""
    rows, valid, step = [np.array([], int)], [np.array([], bool)], 0
    while step < plan.steps:
        begin, end = plan.window_at(lane, step)
        assert begin == step < end, "windows do not follow each other"
        start, stop = begin * plan.per_lane, end * plan.per_lane
        order = plan.order(lane, start, stop)
        pieces = [np.arange(first, first + count) for first, count in zip(*plan.pieces(lane, start, stop))]
        rows.append(np.concatenate(pieces)[order])
        valid.append(plan.is_valid(lane, start + order))
        step = end
    return np.concatenate(rows), np.concatenate(valid)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_an_epoch_has_equal_batches_and_no_row_twice(plan):
    check_an_epoch(plan)


@pytest.mark.long
@settings(max_examples=CASES, deadline=None)
@given(plans())
def test_many_epochs_have_equal_batches_and_no_row_twice(plan):
    check_an_epoch(plan)


@settings(max_examples=100, deadline=None)
@given(plans(shuffle=True, drop_last=True), st.integers(1, 1000))
def test_another_epoch_has_another_order(plan, later):
    if plan.steps and plan.rows > 100:
        others = [replace(plan, epoch=plan.epoch + later + n) for n in range(5)]  # with small windows, one may be equal
        assert any((plan.batch(step) != each.batch(step)).any() for each in others for step in range(plan.steps))


def test_the_order_is_the_same_in_every_version():
    plan = RowOrder(rows=100, unit=7, lanes=3, per_lane=2, window=6, seed=5, epoch=2)
    assert plan.batch(0).tolist() == BATCH


BATCH = [91, 92, 41, 98, 26, 22]


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_a_permutation_has_each_value_once_and_an_inverse(size, key):
    permutation = Permutation(size, key)
    values = permutation.at(np.arange(size))
    assert sorted(values.tolist()) == list(range(size))
    assert permutation.position_of(int(values[size // 2])) == size // 2


def test_orders_of_three_rows_are_equally_frequent():
    orders = [tuple(Permutation(3, hashed(seed)).at(np.arange(3)).tolist()) for seed in range(1200)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert min(counts) > 140


@pytest.mark.parametrize("batch", [256, 8192])
@pytest.mark.parametrize("lanes", [64])
def test_batches_of_a_sorted_table_are_as_mixed_as_independent_samples(batch, lanes):
    rows, row_bytes = 10_000_000, 68
    per_lane = batch // lanes
    plan = RowOrder(rows, unit_rows(row_bytes), lanes, per_lane, window_rows(row_bytes, lanes, per_lane), 0, 0)
    steps = np.linspace(0, plan.steps - 1, 60).astype(int).tolist()
    means = [plan.batch(step).mean() / rows for step in steps]
    independent = (1 / 12) ** 0.5 / batch**0.5
    assert np.std(means) <= 1.5 * independent * 1.2  # 60 means vary by a tenth


def test_windows_of_all_lanes_take_64_mib():
    for lanes in (1, 48, 256):
        assert lanes * window_rows(68, lanes, 4) * 68 <= 64 << 20
    assert window_rows(1 << 20, 48, 4) == 4


def test_a_rank_has_its_share_of_lanes():
    assert [list(lanes_of(6, rank, 3)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ConfigurationError, match=r"48 lanes .* 5 ranks.*lanes=50"):
        lanes_of(48, 0, 5)


def test_a_batch_that_does_not_fit_names_the_nearest():
    check_batch(48, 8160)
    with pytest.raises(ConfigurationError, match=r"global_batch_size=1000 .* 48 lanes.*960 or 1008"):
        check_batch(48, 1000)
    with pytest.raises(ConfigurationError, match=r"take 48"):
        check_batch(48, 20)
