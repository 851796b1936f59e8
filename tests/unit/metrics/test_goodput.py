"""Where the time of a run went, from when it reached which phase and what ranks have told."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from distributor.metrics.goodput import Course, Goodput, Moments, goodput


def course(*steps: tuple[int, float], before: int | None = None, **spent: float) -> Course:
    """The course of an attempt with these steps and their times on the driver's clock."""
    made = Course(**spent)
    for step, time in steps:
        made.note(step, time, before)
    return made


def test_the_wait_for_the_first_batch_is_part_of_the_start() -> None:
    told = Course(data=25.0)
    told.note(1, 60.0, None)
    told.data += 3.0
    assert goodput(Moments(0.0, 10.0, 30.0), told, 70.0) == Goodput(waiting=10.0, starting=50.0, training=7.0, data=3.0)


@pytest.mark.parametrize(
    ("moments", "told", "expected"),
    [
        pytest.param(Moments(0.0), Course(), Goodput(waiting=100.0), id="waits"),
        pytest.param(Moments(0.0, 10.0), Course(), Goodput(waiting=10.0, starting=90.0), id="starts"),
        pytest.param(
            Moments(0.0, 10.0, 30.0),
            Course(),
            Goodput(waiting=10.0, starting=20.0, training=70.0),
            id="without-reports",
        ),
        pytest.param(
            Moments(0.0, 10.0, 30.0),
            course((1, 40.0), (2, 50.0)),
            Goodput(waiting=10.0, starting=30.0, training=60.0),
            id="until-the-first-step",
        ),
        pytest.param(
            Moments(0.0, 10.0, 30.0),
            course((1, 40.0), saving=5.0, loading=4.0),
            Goodput(waiting=10.0, starting=26.0, loading=4.0, saving=5.0, training=55.0),
            id="saves-and-loads",
        ),
        pytest.param(
            Moments(0.0, 10.0, 30.0),
            course((6, 40.0), (7, 50.0), (8, 60.0), before=7),
            Goodput(waiting=10.0, starting=30.0, redoing=20.0, training=40.0),
            id="redoes-two-steps",
        ),
        pytest.param(
            Moments(0.0, 10.0, 30.0),
            course((6, 40.0), (7, 50.0), before=7),
            Goodput(waiting=10.0, starting=30.0, redoing=60.0),
            id="redoes-all",
        ),
        pytest.param(
            Moments(0.0, 10.0, 30.0, 90.0),
            course((1, 40.0)),
            Goodput(waiting=10.0, starting=30.0, training=50.0, stopping=10.0),
            id="is-stopped",
        ),
        pytest.param(
            Moments(0.0),
            course((1, 40.0), saving=5.0),
            Goodput(waiting=40.0, saving=5.0, training=55.0),
            id="no-channel",
        ),
        pytest.param(Moments(0.0, stopping=20.0), Course(), Goodput(waiting=20.0, stopping=80.0), id="never-starts"),
    ],
)
def test_one_attempt(moments: Moments, told: Course, expected: Goodput) -> None:
    assert goodput(moments, told, 100.0) == expected


def test_a_stall_is_no_training() -> None:
    found = goodput(Moments(0.0, 0.0, 0.0, 90.0), course((1, 10.0)), 90.0, stall=30.0)
    assert found == Goodput(starting=10.0, training=50.0, stalled=30.0)


SECONDS = st.floats(0.0, 1000.0)


@given(st.lists(st.none() | SECONDS, min_size=3, max_size=3), SECONDS, st.lists(SECONDS, max_size=3), SECONDS, SECONDS)
def test_the_parts_add_up(
    reached: list[float | None], now: float, steps: list[float], saved: float, loaded: float
) -> None:
    """Whatever the clocks say."""
    told = course(*enumerate(steps), before=1, saving=saved, loading=loaded)
    found = goodput(Moments(0.0, *reached), told, now, stall=10.0)
    assert found.total == pytest.approx(now)
    assert min(found._parts()) >= -1e-9


def test_attempts_add_up() -> None:
    assert Goodput(1.0, 2.0) + Goodput(training=3.0, stopping=4.0) == Goodput(4.0, 2.0, stopping=4.0)
    assert Goodput().share == 0.0
