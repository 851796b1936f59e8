"""Moments of a run become seconds by phase."""

from __future__ import annotations

import pytest

from distributor.outcomes.timings import phases
from distributor.values.outcome import Collected, Failure, NodeReport, Outcome


def test_a_phase_ends_when_the_last_has_ended_it() -> None:
    reports = (
        NodeReport(
            0,
            "a",
            (Outcome(0, "a", "finished", called=106.0, returned=110.0),),
            times={"agent": 103.0, "ready": 104.0, "started": 105.0, "exited": 111.0},
        ),
        NodeReport(
            1,
            "b",
            (Outcome(1, "b", "finished", called=106.5, returned=109.0),),
            times={"agent": 103.5, "ready": 103.6, "started": 105.5, "exited": 112.0},
        ),
    )
    got = phases(100.0, Collected(reports, times={"stage": 101.0, "task": 102.0, "facts": 102.5}), 113.0)
    assert got == {
        **{"schedule": 1.0, "worker": 1.0, "exchange": 0.5, "agent": 1.0, "import": 0.5, "fork": 1.5},
        **{"call": 1.0, "function": 3.5, "exit": 2.0, "collect": 1.0, "total": 13.0},
    }


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(0, "a", "stopped"),
        Outcome(0, "a", "failed", Failure(0, 0, "a", "signal", "killed by SIGKILL", time=118.0)),
    ],
)
def test_ranks_that_did_not_return_were_in_their_function(outcome: Outcome) -> None:
    times = {"agent": 101.0, "ready": 102.0, "started": 103.0, "exited": 118.0}
    got = phases(100.0, Collected((NodeReport(0, "a", (outcome,), times=times),)), 120.0)
    assert (got["function"], got["exit"], got["collect"]) == (15.0, 0.0, 2.0)


def test_a_rank_that_was_stopped_counts_beside_one_that_returned() -> None:
    ended = (Outcome(0, "a", "finished", called=103.0, returned=105.0), Outcome(1, "a", "stopped"))
    times = {"agent": 101.0, "ready": 102.0, "started": 103.0, "exited": 118.0}
    got = phases(100.0, Collected((NodeReport(0, "a", ended, times=times),)), 120.0)
    assert (got["function"], got["exit"]) == (15.0, 0.0)


def test_a_run_that_never_began() -> None:
    got = phases(100.0, Collected(), 103.0)
    assert (got.pop("collect"), got.pop("total")) == (3.0, 3.0)
    assert set(got.values()) == {0.0}
