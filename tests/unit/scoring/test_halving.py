"""Which rows are at fault."""

import numpy as np
import pytest

from distributor.scoring.halving import halved, joined


def odd(bad, calls):
    def call(first, last):
        calls.append((first, last))
        if bad & set(range(first, last)):
            raise ValueError("bad")
        return list(range(first, last))

    return call


@pytest.mark.parametrize("bad", [set(), {0}, {7}, {2, 3}, set(range(8))])
def test_all_rows_but_those_at_fault_are_computed(bad):
    failed = {}
    parts = halved(odd(bad, []), 0, 8, failed, all_rows=True)
    assert [row for part in parts for row in part] == [row for row in range(8) if row not in bad]
    assert set(failed) == bad
    assert all(text.startswith("ValueError: bad (") for text in failed.values())


def test_the_first_row_at_fault_may_be_enough():
    failed, calls = {}, []
    halved(odd({2, 7}, calls), 0, 8, failed, all_rows=False)
    assert list(failed) == [2]
    assert (4, 8) not in calls


class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [(Mute(), "Mute: its text cannot be made: KeyError"), (OSError("a\udcff"), "OSError: a\\udcff")],
)
def test_any_error_has_a_text_that_can_be_sent(error, text):
    failed = {}

    def call(first, last):
        raise error

    halved(call, 0, 1, failed, all_rows=True)
    assert failed[0].startswith(f"{text} (")
    failed[0].encode()


def test_a_users_project_may_be_named_like_this_package():
    names = {}
    exec(compile("def call(*_): raise ValueError('bad')", "/home/me/distributor/train.py", "exec"), names)
    halved(names["call"], 0, 1, failed := {}, all_rows=True)
    assert failed == {0: "ValueError: bad (/home/me/distributor/train.py, line 1, in call)"}


def test_parts_become_one():
    assert joined([np.zeros((2, 3)), np.zeros((1, 3))]).shape == (3, 3)
    assert joined([np.zeros((1, 3)), ["a"]])[-1] == "a"
