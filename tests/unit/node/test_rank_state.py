"""The ranks of a node as a state machine: tables of events and actions, and what holds for any sequence of events."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

import pytest
from hypothesis import given, strategies as st

from distributor.node.rank_state import (
    PATIENCE,
    Action,
    AwaitingCause,
    BeginRanks,
    Begun,
    Event,
    Killed,
    NotBegun,
    OpenGate,
    ProcessExited,
    RankState,
    ReleaseRequested,
    SignalRanks,
    SigtermReceived,
    SpawnRanks,
    StopRequested,
    TellAgent,
    TellStarted,
    Terminating,
    TimePassed,
)
from distributor.values.messages import RankExited, Terminated

GRACE = 10.0
BEGUN = [SpawnRanks(), TellStarted(), OpenGate()]


def told(local_rank: int, code: int, moment: float, **ended: float | bool | None) -> TellAgent:
    return TellAgent(RankExited(local_rank, code, ended.pop("stopped", None), moment, **ended))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spare", "steps"),
    [
        pytest.param(
            False,
            [
                (BeginRanks(), 0.0, BEGUN, Begun()),
                (BeginRanks(), 1.0, [], Begun()),
                (ProcessExited(0, 0), 2.0, [told(0, 0, 2.0)], Begun()),
                (ProcessExited(1, 0), 3.0, [told(1, 0, 3.0)], Begun()),
                (TimePassed(), 99.0, [], Begun()),
            ],
            id="all-succeed",
        ),
        pytest.param(
            False,
            [
                (BeginRanks(), 0.0, BEGUN, Begun()),
                (ProcessExited(1, 3), 1.0, [told(1, 3, 1.0), SignalRanks(SIGTERM, (0,))], Terminating(11.0)),
                (TimePassed(), 10.9, [], Terminating(11.0)),
                (TimePassed(), 11.0, [SignalRanks(SIGKILL, (0,))], Killed()),
                (TimePassed(), 99.0, [], Killed()),
                (ProcessExited(0, -9), 99.5, [told(0, -9, 99.5, stopped=1.0)], Killed()),
            ],
            id="a-failure-stops-the-others",
        ),
        pytest.param(
            False,
            [
                (BeginRanks(), 0.0, BEGUN, Begun()),
                (ProcessExited(1, 1, echoes=True), 1.0, [told(1, 1, 1.0)], AwaitingCause(1.0 + PATIENCE)),
                (ProcessExited(0, 3), 1.5, [told(0, 3, 1.5)], Terminating(11.5)),
            ],
            id="the-cause-of-an-echo-ends-by-itself",
        ),
        pytest.param(
            False,
            [
                (BeginRanks(), 0.0, BEGUN, Begun()),
                (ProcessExited(1, 1, echoes=True), 1.0, [told(1, 1, 1.0)], AwaitingCause(1.0 + PATIENCE)),
                (TimePassed(), 1.0 + PATIENCE, [SignalRanks(SIGTERM, (0,))], Terminating(11.0 + PATIENCE)),
            ],
            id="an-echo-without-a-cause",
        ),
        pytest.param(
            True,
            [
                (BeginRanks(), 0.0, BEGUN, Begun()),
                (ProcessExited(1, 3), 1.0, [told(1, 3, 1.0)], AwaitingCause(1.0 + PATIENCE)),
                (StopRequested(ordered=True, fast=True), 1.2, [], Terminating(11.2)),
                (ProcessExited(0, -9), 1.3, [told(0, -9, 1.3, stopped=1.2)], Terminating(11.2)),
            ],
            id="the-agent-kills-for-another-attempt",
        ),
        pytest.param(
            False,
            [
                (StopRequested(ordered=True), 1.0, [SignalRanks(SIGTERM, (0, 1))], Terminating(1.0)),
                (TimePassed(), 1.0, [SignalRanks(SIGKILL, (0, 1))], Killed()),
                (ProcessExited(0, -15), 1.1, [TellStarted(), told(0, -15, 1.1, stopped=1.0)], Killed()),
            ],
            id="no-grace-period-before-the-ranks-begin",
        ),
        pytest.param(
            False,
            [
                (
                    ProcessExited(0, -9),
                    1.0,
                    [TellStarted(), told(0, -9, 1.0), SignalRanks(SIGTERM, (1,))],
                    Terminating(1.0),
                ),
                (BeginRanks(), 1.1, [SignalRanks(SIGKILL, (1,))], Killed()),
            ],
            id="a-rank-is-killed-before-it-begins",
        ),
        pytest.param(
            False,
            [
                (BeginRanks(), 0.0, BEGUN, Begun()),
                (ProcessExited(0, 0), 1.0, [told(0, 0, 1.0)], Begun()),
                (ReleaseRequested(), 2.0, [SignalRanks(SIGTERM, (1,))], Terminating(12.0)),
                (ReleaseRequested(), 3.0, [], Terminating(12.0)),
                (ProcessExited(1, -15), 4.0, [told(1, 0, 4.0, released=2.0)], Terminating(12.0)),
            ],
            id="a-serving-rank-is-released",
        ),
        pytest.param(
            False,
            [
                (BeginRanks(), 0.0, BEGUN, Begun()),
                (
                    ProcessExited(0, 0, early=True),
                    1.0,
                    [told(0, 0, 1.0, early=True), SignalRanks(SIGTERM, (1,))],
                    Terminating(11.0),
                ),
            ],
            id="a-rank-leaves-early",
        ),
        pytest.param(
            False,
            [(SigtermReceived(), 0.0, [TellAgent(Terminated())], NotBegun()), (BeginRanks(), 0.5, BEGUN, Begun())],
            id="sigterm-is-for-the-agent-to-decide-about",
        ),
    ],
)
def test_events_lead_to_actions(spare: bool, steps: list[tuple[Event, float, list[Action], object]]) -> None:
    state = two_ranks(spare)
    for event, now, actions, phase in steps:
        assert (state.on(event, now), state.phase) == (actions, phase), event


def test_a_rank_that_ends_as_all_begin_keeps_nobody_waiting() -> None:
    """The thread that has asked to begin tells other nodes of the failure."""
    state = two_ranks(spare=False)
    state.on(ProcessExited(0, -9), 1.0)
    assert not state.has_begun
    assert TellStarted() not in state.on(BeginRanks(), 1.0)
    assert state.has_begun


def two_ranks(spare: bool) -> RankState:
    state = RankState(GRACE, spare=spare)
    state.add()
    state.add()
    return state


fast = StopRequested(ordered=True, fast=True)
events = st.lists(
    st.sampled_from(
        [BeginRanks(), StopRequested(), StopRequested(ordered=True), fast, ReleaseRequested(), SigtermReceived()]
    )
    | st.builds(ProcessExited, st.integers(0, 1), st.sampled_from([0, 3, -15]), st.booleans(), st.booleans()),
    max_size=8,
)


@given(st.booleans(), events)
def test_any_sequence_ends_all_ranks_that_must_end(spare: bool, sequence: list[Event]) -> None:
    state, ended, announced, killed = two_ranks(spare), set[int](), 0, set[int]()
    for number, event in enumerate([*sequence, TimePassed(), TimePassed()]):
        if isinstance(event, ProcessExited):
            if event.local_rank in ended:
                continue
            ended.add(event.local_rank)
        now = number + (1000.0 * (number - len(sequence) + 1) if number >= len(sequence) else 0.0)
        for action in state.on(event, now):
            announced += isinstance(action, TellStarted)
            if isinstance(action, TellAgent) and isinstance(action.message, RankExited):
                assert announced == 1
            if isinstance(action, SignalRanks):
                assert action.local_ranks and not ended & {*action.local_ranks}
                killed |= {*action.local_ranks} if action.number == SIGKILL else set()
    assert state.running() == tuple({0, 1} - ended)
    if any(isinstance(event, StopRequested | ReleaseRequested) for event in sequence) or state.has_failed:
        assert {*state.running()} <= killed
