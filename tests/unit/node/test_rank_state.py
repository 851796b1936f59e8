"""The ranks of a node as a state machine: tables of events and actions, and what holds for any sequence of events."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

import pytest
from hypothesis import given, strategies as st

from distributor.node.rank_state import (
    PATIENCE,
    Action,
    Announce,
    Begin,
    Event,
    Exited,
    GotSigterm,
    Holding,
    Killing,
    LetBegin,
    RankState,
    Release,
    Running,
    Signal,
    Spawn,
    Stop,
    Stopping,
    Tell,
    TimePassed,
    Waiting,
)
from distributor.values.messages import RankExited, Terminated

GRACE = 10.0
BEGUN = [Spawn(), Announce(), LetBegin()]


def told(local_rank: int, code: int, moment: float, **ended: float | bool | None) -> Tell:
    return Tell(RankExited(local_rank, code, ended.pop("stopped", None), moment, **ended))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spare", "steps"),
    [
        pytest.param(
            False,
            [
                (Begin(), 0.0, BEGUN, Running()),
                (Begin(), 1.0, [], Running()),
                (Exited(0, 0), 2.0, [told(0, 0, 2.0)], Running()),
                (Exited(1, 0), 3.0, [told(1, 0, 3.0)], Running()),
                (TimePassed(), 99.0, [], Running()),
            ],
            id="all-succeed",
        ),
        pytest.param(
            False,
            [
                (Begin(), 0.0, BEGUN, Running()),
                (Exited(1, 3), 1.0, [told(1, 3, 1.0), Signal(SIGTERM, (0,))], Stopping(11.0)),
                (TimePassed(), 10.9, [], Stopping(11.0)),
                (TimePassed(), 11.0, [Signal(SIGKILL, (0,))], Killing()),
                (TimePassed(), 99.0, [], Killing()),
                (Exited(0, -9), 99.5, [told(0, -9, 99.5, stopped=1.0)], Killing()),
            ],
            id="a-failure-stops-the-others",
        ),
        pytest.param(
            False,
            [
                (Begin(), 0.0, BEGUN, Running()),
                (Exited(1, 1, echoes=True), 1.0, [told(1, 1, 1.0)], Holding(1.0 + PATIENCE)),
                (Exited(0, 3), 1.5, [told(0, 3, 1.5)], Stopping(11.5)),
            ],
            id="the-cause-of-an-echo-ends-by-itself",
        ),
        pytest.param(
            False,
            [
                (Begin(), 0.0, BEGUN, Running()),
                (Exited(1, 1, echoes=True), 1.0, [told(1, 1, 1.0)], Holding(1.0 + PATIENCE)),
                (TimePassed(), 1.0 + PATIENCE, [Signal(SIGTERM, (0,))], Stopping(11.0 + PATIENCE)),
            ],
            id="an-echo-without-a-cause",
        ),
        pytest.param(
            True,
            [
                (Begin(), 0.0, BEGUN, Running()),
                (Exited(1, 3), 1.0, [told(1, 3, 1.0)], Holding(1.0 + PATIENCE)),
                (Stop(ordered=True, fast=True), 1.2, [], Stopping(11.2)),
                (Exited(0, -9), 1.3, [told(0, -9, 1.3, stopped=1.2)], Stopping(11.2)),
            ],
            id="the-agent-kills-for-another-attempt",
        ),
        pytest.param(
            False,
            [
                (Stop(ordered=True), 1.0, [Signal(SIGTERM, (0, 1))], Stopping(1.0)),
                (TimePassed(), 1.0, [Signal(SIGKILL, (0, 1))], Killing()),
                (Exited(0, -15), 1.1, [Announce(), told(0, -15, 1.1, stopped=1.0)], Killing()),
            ],
            id="no-grace-period-before-the-ranks-begin",
        ),
        pytest.param(
            False,
            [
                (Exited(0, -9), 1.0, [Announce(), told(0, -9, 1.0), Signal(SIGTERM, (1,))], Stopping(1.0)),
                (Begin(), 1.1, [Signal(SIGKILL, (1,))], Killing()),
            ],
            id="a-rank-is-killed-before-it-begins",
        ),
        pytest.param(
            False,
            [
                (Begin(), 0.0, BEGUN, Running()),
                (Exited(0, 0), 1.0, [told(0, 0, 1.0)], Running()),
                (Release(), 2.0, [Signal(SIGTERM, (1,))], Stopping(12.0)),
                (Release(), 3.0, [], Stopping(12.0)),
                (Exited(1, -15), 4.0, [told(1, 0, 4.0, released=2.0)], Stopping(12.0)),
            ],
            id="a-serving-rank-is-released",
        ),
        pytest.param(
            False,
            [
                (Begin(), 0.0, BEGUN, Running()),
                (Exited(0, 0, early=True), 1.0, [told(0, 0, 1.0, early=True), Signal(SIGTERM, (1,))], Stopping(11.0)),
            ],
            id="a-rank-leaves-early",
        ),
        pytest.param(
            False,
            [(GotSigterm(), 0.0, [Tell(Terminated())], Waiting()), (Begin(), 0.5, BEGUN, Running())],
            id="sigterm-is-for-the-agent-to-decide-about",
        ),
    ],
)
def test_events_lead_to_actions(spare: bool, steps: list[tuple[Event, float, list[Action], object]]) -> None:
    state = two_ranks(spare)
    for event, now, actions, phase in steps:
        assert (state.on(event, now), state.phase) == (actions, phase), event


def two_ranks(spare: bool) -> RankState:
    state = RankState(GRACE, spare=spare)
    state.add()
    state.add()
    return state


events = st.lists(
    st.sampled_from([Begin(), Stop(), Stop(ordered=True), Stop(ordered=True, fast=True), Release(), GotSigterm()])
    | st.builds(Exited, st.integers(0, 1), st.sampled_from([0, 3, -15]), st.booleans(), st.booleans()),
    max_size=8,
)


@given(st.booleans(), events)
def test_any_sequence_ends_all_ranks_that_must_end(spare: bool, sequence: list[Event]) -> None:
    state, ended, announced, killed = two_ranks(spare), set[int](), 0, set[int]()
    for number, event in enumerate([*sequence, TimePassed(), TimePassed()]):
        if isinstance(event, Exited):
            if event.local_rank in ended:
                continue
            ended.add(event.local_rank)
        now = number + (1000.0 * (number - len(sequence) + 1) if number >= len(sequence) else 0.0)
        for action in state.on(event, now):
            announced += isinstance(action, Announce)
            if isinstance(action, Tell) and isinstance(action.message, RankExited):
                assert announced == 1
            if isinstance(action, Signal):
                assert action.local_ranks and not ended & {*action.local_ranks}
                killed |= {*action.local_ranks} if action.number == SIGKILL else set()
    assert state.running() == tuple({0, 1} - ended)
    if any(isinstance(event, Stop | Release) for event in sequence) or state.has_failed:
        assert {*state.running()} <= killed
