"""What one attempt does about what happens: events in, actions out, without threads, clocks or processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs import make_job

from distributor import PreemptionError, Status
from distributor.outcomes.causes import Cancelled, Disagreed, NodeLost, RankFailed, Stalled, StartTimeout, joined
from distributor.outcomes.stacks import Stacks
from distributor.run import state as run_state
from distributor.run.events import (
    Announce,
    Arm,
    Asked,
    AskLeaving,
    AskRoom,
    AskScheduler,
    AskStacks,
    AtRest,
    Cancel,
    Deadline,
    DriverTerminated,
    Due,
    EndJob,
    Halt,
    Heard,
    JobEnded,
    Kill,
    Leaving,
    Lost,
    Returned,
    Room,
    Stood,
    StopRanks,
    TellNodes,
    Warn,
)
from distributor.run.margins import Margins
from distributor.run.restart_policy import again, again_in_new_job, surely_again
from distributor.run.state import AttemptState, Ended, Running, Starting, Stopping, Waiting
from distributor.values import messages
from distributor.values.job import StatusDetail, Widths
from distributor.values.messages import Agree, Halted, Propose, RankPreempted, Reached
from distributor.values.options import Recovery
from distributor.values.outcome import Collected, Failure, NodeReport, Outcome
from distributor.values.placement import Node, Placement

A, B = Node(0, "a", "host-a", "10.0.0.1", 1, 0, 0, 2), Node(1, "b", "host-b", "10.0.0.2", 1, 2, 2, 2)
MARGINS = Margins(stop=1.0, kill=2.0, lost=3.0, unreached=60.0, look=5.0)
ERROR = Failure(1, 1, "host-a", "ValueError", "ValueError: no")
RESET = Failure(2, 0, "host-b", "RuntimeError", "RuntimeError: Connection reset by peer")

HELLO_A, HELLO_B = (Heard(name, messages.AllNodes((A, B))) for name in "ab")
STARTED_A, STARTED_B = (Heard(name, messages.Started(attempt=0)) for name in "ab")
UP = (HELLO_A, HELLO_B, STARTED_A, STARTED_B)
FAILED = Heard("a", messages.Failed(ERROR, attempt=0))
BYE_A = Heard("a", messages.Bye())
DIED = Lost("b", "its agent died")
STOOD = Stood(Stacks({0: "it hangs"}))


def state(**options: Any) -> AttemptState:
    return AttemptState(make_job("3f2a", 4, **options), 0.0, MARGINS)


def after(*events: Any, now: float = 1.0, **options: Any) -> AttemptState:
    """The state after some events."""
    made = state(**options)
    for event in events:
        made.on(event, now)
    return made


def beat(node: str, alive: int, idle: float | None = None) -> Heard:
    return Heard(node, messages.Beat(alive, idle))


@pytest.mark.parametrize(
    ("before", "event", "phase", "status"),
    [
        ((), Heard("a", messages.Importing("a", 2, "torch")), Waiting(0.0), Status.WAITING),
        ((), Heard("a", messages.Hello("a")), Waiting(0.0), Status.WAITING),
        ((), HELLO_A, Starting(7.0), Status.STARTING),
        ((HELLO_A,), HELLO_B, Starting(1.0), Status.STARTING),
        ((HELLO_A, HELLO_B), STARTED_A, Starting(1.0), Status.STARTING),
        ((HELLO_A, HELLO_B, STARTED_A), STARTED_B, Running(7.0), Status.RUNNING),
        (UP, HELLO_A, Running(1.0), Status.RUNNING),  # after a break of its connection
        (UP, beat("a", 2), Running(1.0), Status.RUNNING),
        ((), Cancel("enough"), Stopping(7.0, Cancelled(), "enough", 10.0), Status.STOPPING),
        (UP, Cancel("enough"), Stopping(7.0, Cancelled(), "enough", 10.0), Status.STOPPING),
        (UP, Kill(), Stopping(7.0, Cancelled(), "killed", 0.0), Status.STOPPING),
        ((*UP, FAILED), Kill(), Stopping(1.0, RankFailed((ERROR,)), "killed", 0.0), Status.STOPPING),
        (UP, FAILED, Stopping(7.0, RankFailed((ERROR,)), "rank 1 failed: ValueError: no", 10.0), Status.STOPPING),
        (
            UP,
            Heard("a", messages.Failed(attempt=0)),
            Stopping(7.0, RankFailed(), "a rank failed", 10.0),
            Status.STOPPING,
        ),
        (
            (*UP, FAILED),
            Cancel("enough"),
            Stopping(1.0, RankFailed((ERROR,)), "rank 1 failed: ValueError: no", 10.0),
            Status.STOPPING,
        ),
        ((*UP, Cancel("enough")), FAILED, Stopping(1.0, Cancelled(), "enough", 10.0), Status.STOPPING),
        (UP, JobEnded(Status.SUCCEEDED), Ended(7.0, Status.SUCCEEDED), Status.SUCCEEDED),
        ((JobEnded(Status.FAILED),), FAILED, Ended(1.0, Status.FAILED), Status.FAILED),
        ((JobEnded(Status.FAILED),), Kill(), Ended(1.0, Status.FAILED), Status.FAILED),
    ],
)
def test_phases(before: tuple[Any, ...], event: Any, phase: Any, status: Status) -> None:
    made = after(*before)
    made.on(event, 7.0)
    assert made.phase == phase
    assert made.status is status


STOP_10 = [StopRanks("enough"), Arm(Deadline.END, 11.0)]
PLACED = "run 3f2a: 4 ranks on 2 nodes: node 0 on host-a (10.0.0.1): ranks 0-1; node 1 on host-b (10.0.0.2): ranks 2-3"


@pytest.mark.parametrize(
    ("before", "event", "actions"),
    [
        ((), HELLO_A, [Announce(PLACED)]),
        ((HELLO_A,), HELLO_B, []),
        ((), Cancel("enough"), [StopRanks("enough"), Arm(Deadline.END, 0.0)]),  # no node is there to wait for
        (UP, Cancel("enough"), STOP_10),
        ((*UP, Cancel("enough")), Cancel("again"), []),
        (
            UP,
            Kill(),
            [StopRanks("killed"), Arm(Deadline.END, 11.0), StopRanks("killed", False), Arm(Deadline.END, 2.0)],
        ),
        ((*UP, FAILED), Kill(), [StopRanks("killed", False), Arm(Deadline.END, 2.0)]),
        (UP, FAILED, [StopRanks("rank 1 failed: ValueError: no"), Arm(Deadline.END, 11.0)]),
        (UP, Due(Deadline.END), [EndJob()]),
        (UP, BYE_A, []),
        ((*UP, DIED), DIED, []),  # said twice
        ((*UP, DIED), BYE_A, [Arm(Deadline.END, 3.0)]),  # all are gone, and one of them is lost
        ((*UP, FAILED), BYE_A, []),
        ((), Due(Deadline.START), [AskScheduler(Deadline.START)]),
        (UP, Due(Deadline.START), []),
        ((HELLO_A,), Due(Deadline.START), [StopRanks("start_timeout has passed"), Arm(Deadline.END, 11.0)]),
        ((HELLO_A, STARTED_A), Due(Deadline.START), []),  # the other may be unable to reach the channel
        ((), Asked(Deadline.START, None, "a:1", False), []),  # tasks run, and cannot reach the channel
        (
            (),
            Asked(Deadline.START, StatusDetail("waiting for 2 task slots"), None, False),
            [StopRanks("start_timeout has passed"), Arm(Deadline.END, 0.0)],
        ),
        (UP, Asked(Deadline.START, StatusDetail("waiting"), None, True), []),  # asked before they were up
        ((), Due(Deadline.REACH), [AskScheduler(Deadline.REACH)]),
        ((Cancel("enough"),), Due(Deadline.REACH), []),
        ((), Asked(Deadline.REACH, None, "a:1", True), []),
        ((), Asked(Deadline.REACH, StatusDetail("waiting"), "a:1", False), [Arm(Deadline.REACH, 5.0)]),
        ((), Asked(Deadline.REACH, None, None, False), [Arm(Deadline.REACH, 5.0)]),
        ((), Asked(Deadline.REACH, None, "a:1", False), [Arm(Deadline.REACH, 5.0)]),
        (UP, STOOD, []),  # without a stall_timeout
        ((), Heard("b", messages.Warnings("host-b", ("is slow",))), [Warn("the node on host-b is slow")]),
        ((Heard("b", messages.Warnings("h", ("is slow",))),), Heard("b", messages.Warnings("h", ("is slow",))), []),
        ((JobEnded(Status.FAILED),), Due(Deadline.END), []),
    ],
)
def test_actions(before: tuple[Any, ...], event: Any, actions: list[Any]) -> None:
    assert after(*before).on(event, 7.0) == actions


def test_an_attempt_begins_with_its_deadlines() -> None:
    assert state(start_timeout=60.0).begin() == [Arm(Deadline.START, 60.0), Arm(Deadline.REACH, 5.0)]


@pytest.mark.parametrize("event", [DIED, Heard("b", messages.Dead()), Heard("b", messages.Orphaned(lives=False))])
def test_a_node_that_is_lost_is_told_with_what_was_last_known(event: Any) -> None:
    made = after(*UP, beat("b", 1))
    if event is DIED:
        event = Lost("b", "its agent died", {0: "epoch 1", 3: "epoch 2"})
    (stop, *_) = made.on(event, 7.0)
    assert stop == StopRanks("lost the node on host-b (node 1, ranks 2-3)")
    assert isinstance(made.cause, NodeLost)
    (told,) = made.cause.nodes
    assert told.startswith("host-b (node 1, ranks 2-3): its ")
    assert ("; last known state, 6 s earlier: 1 rank running, last line of rank 3: 'epoch 2'" in told) == (
        event.__class__ is Lost
    )


def test_the_node_that_lost_its_task_first_is_named_too() -> None:
    """Its ranks had succeeded. Spark then ended the task of the other node, whose rank had not."""
    made = after(*UP)
    assert made.on(Heard("a", messages.Orphaned(lives=True)), 7.0) == []
    assert made.cause is None
    made.on(Heard("b", messages.Orphaned(lives=False)), 7.1)
    assert isinstance(made.cause, NodeLost)
    assert [told.partition(" (")[0] for told in made.cause.nodes] == ["host-a", "host-b"]


def test_a_node_without_a_task_that_is_lost_later_is_told_once() -> None:
    made = after(*UP, Heard("b", messages.Orphaned(lives=True)), Heard("b", messages.Orphaned(lives=False)))
    assert isinstance(made.cause, NodeLost)
    assert len(made.cause.nodes) == 1
    made = after(*UP, Heard("b", messages.Orphaned(lives=True)), Heard("b", messages.Bye()), Lost("a", "gone"))
    assert isinstance(made.cause, NodeLost)
    assert [told.partition(" (")[0] for told in made.cause.nodes] == ["host-a"]


def test_what_a_late_run_was_doing_is_its_cause() -> None:
    importing = Heard("a", messages.Importing("a", 2, "torch"))
    made = after(importing, Due(Deadline.START), start_timeout=60.0)
    assert made.cause == StartTimeout(60.0, StatusDetail("importing torch", " on 1 of 2 nodes"))


def test_a_driver_that_nobody_reaches_says_so_once_and_takes_it_back() -> None:
    made, unheard = state(), Asked(Deadline.REACH, None, "driver:4711", False)
    assert made.on(unheard, 10.0) == [Arm(Deadline.REACH, 5.0)]
    assert made.on(Asked(Deadline.REACH, StatusDetail("waiting"), "driver:4711", False), 20.0) == [
        Arm(Deadline.REACH, 5.0)
    ]
    assert made.on(unheard, 30.0) == [Arm(Deadline.REACH, 5.0)]  # Spark has just started the tasks (again)
    assert made.on(unheard, 89.0) == [Arm(Deadline.REACH, 5.0)]
    (warned,) = made.on(unheard, 90.0)
    assert isinstance(warned, Warn)
    assert "have run for 60 s, but no node has reached the driver at driver:4711" in warned.text
    assert made.unreached
    quiet = Collected((NodeReport(0, "a", warnings=("cannot reach the driver at ...", "is slow")),))
    assert made.on(Returned(quiet), 91.0) == [Warn("the node on a is slow")]  # what was said is not said again
    (back, announced) = made.on(HELLO_A, 92.0)
    assert back == Warn(
        "run 3f2a: the node on host-a (node 0, ranks 0-1) has now reached the driver: its log lines follow"
    )
    assert isinstance(announced, Announce)
    assert not made.unreached


def test_a_stall_is_asked_about_and_then_the_cause() -> None:
    made = after(*UP, stall_timeout=5.0)
    assert made.on(beat("a", 2, 6.0), 2.0) == []
    assert made.on(beat("b", 2, 6.0), 3.0) == []
    assert made.on(beat("a", 2, 7.0), 4.0) == []
    assert made.on(beat("b", 2, 7.0), 5.0) == [AskStacks()]
    assert isinstance(made.phase, Running)
    stop, _ = made.on(STOOD, 6.0)
    assert made.cause == Stalled(5.0, Stacks({0: "it hangs"}))
    assert stop.reason.startswith("no rank wrote anything or used CPU time for stall_timeout=5 s: rank 0: it hangs")
    assert made.on(STOOD, 6.0) == []


def test_what_comes_back_tells_the_placement_and_warnings_of_all_hosts_at_once() -> None:
    reports = tuple(
        NodeReport(node.node_rank, node.host, warnings=("is slow",), placement=Placement((A, B))) for node in (A, B)
    )
    made = state()
    assert made.on(Returned(Collected(reports)), 1.0) == [Warn("each node on host-a, host-b is slow")]
    assert made.nodes.placement == Placement((A, B))


LOST = NodeLost(("host-b",))


@pytest.mark.parametrize(
    ("first", "then", "both"),
    [
        (Cancelled(), RankFailed((ERROR,)), Cancelled()),
        (RankFailed((ERROR,)), Cancelled(), RankFailed((ERROR,))),
        (RankFailed((ERROR,)), RankFailed((RESET,)), RankFailed((ERROR, RESET))),
        (RankFailed((RESET,)), LOST, NodeLost(("host-b",), (RESET,))),
        (LOST, RankFailed((RESET,)), NodeLost(("host-b",), (RESET,))),
        (LOST, NodeLost(("host-c",)), NodeLost(("host-b", "host-c"))),
    ],
)
def test_causes_that_come_together(first: Any, then: Any, both: Any) -> None:
    assert joined(first, then) == both


RESTS_A, RESTS_B = (Heard(name, messages.Stopped(port, (), attempt=0)) for name, port in (("a", 4711), ("b", 4712)))

UNABLE = Heard("b", messages.Stopped(4712, (), ("StartError", "the launcher on host-b failed"), attempt=0))


@pytest.mark.parametrize(
    ("before", "event", "rest"),
    [
        ((*UP, FAILED), RESTS_A, []),
        ((*UP, FAILED, RESTS_B), RESTS_A, [AtRest(4711)]),  # all meet at node 0
        ((*UP, FAILED, RESTS_A), RESTS_B, [AtRest(4711)]),
        ((*UP, RESTS_A), RESTS_B, [AtRest(4711)]),  # nobody has told why
        ((*UP, FAILED, RESTS_A), DIED, [AtRest(None)]),  # a node is lost: the other must not wait for ever
        ((*UP, FAILED, RESTS_B), Lost("a", "its agent died"), [AtRest(None)]),
        ((*UP, DIED), RESTS_A, [AtRest(None)]),
        ((*UP, UNABLE), RESTS_A, [AtRest(None)]),  # it could not start its ranks in another attempt either
        ((HELLO_A, FAILED), RESTS_A, [AtRest(None)]),  # the other one may have no channel
        ((HELLO_A, STARTED_A), RESTS_A, [AtRest(None)]),  # and its rank may have failed
        ((HELLO_A, HELLO_B, FAILED), RESTS_A, []),  # the other one comes up
    ],
)
def test_nodes_that_have_all_stopped_are_told_how_it_goes_on(
    before: tuple[Any, ...], event: Any, rest: list[AtRest]
) -> None:
    assert [action for action in after(*before).on(event, 7.0) if isinstance(action, AtRest)] == rest


def test_nodes_that_end_one_after_another_are_told_once_how_it_goes_on() -> None:
    """Each decision looks at all failures."""
    made = after(*UP, FAILED, RESTS_A, UNABLE)
    assert made.on(Heard("b", messages.Bye()), 7.0) == []
    assert made.on(BYE_A, 8.0) == []


def test_another_attempt_begins_with_the_nodes_that_are_there() -> None:
    nodes = after(*UP, FAILED, RESTS_A, RESTS_B).nodes
    nodes.again()
    made = AttemptState(make_job(num_processes=4), 8.0, MARGINS, nodes, 1)
    assert made.begin() == [Arm(Deadline.START, 600.0)]
    assert made.phase == Starting(8.0)
    assert (made.nodes.up, made.nodes.ranks_up, made.nodes.all_rest) == (0, 0, False)
    assert made.on(Due(Deadline.START), 9.0)[0] == StopRanks("start_timeout has passed")
    made = AttemptState(make_job(num_processes=4), 8.0, MARGINS, nodes, 1)
    for name in "ab":
        made.on(Heard(name, messages.Started(attempt=1)), 9.0)
    assert made.phase == Running(9.0)


@pytest.mark.parametrize(
    "again",
    [
        (STARTED_A, STARTED_B),
        (FAILED,),
        (RESTS_A, RESTS_B),
        (Heard("b", RankPreempted(2, attempt=0)),),
        (Heard("a", Halted(0, 5, attempt=0)), Heard("b", Halted(2, 6, attempt=0))),
    ],
)
def test_what_nodes_say_again_of_the_attempt_before_changes_nothing(again: tuple[Heard, ...]) -> None:
    nodes = after(*UP, FAILED, RESTS_A, RESTS_B).nodes
    nodes.again()
    made = AttemptState(make_job(num_processes=4), 8.0, MARGINS, nodes, 1)
    assert [made.on(event, 9.0) for event in again] == [[]] * len(again)
    assert made.phase == Starting(8.0)
    assert (made.nodes.up, made.nodes.all_rest, made.stop_vote.preempted) == (0, False, "")


@pytest.mark.parametrize(
    ("events", "action"),
    [
        ((), EndJob()),
        ((Heard("a", messages.Keeping(True)),), Arm(Deadline.END, 1.0)),
        ((Heard("a", messages.Keeping(True)), Heard("a", messages.Keeping(False))), EndJob()),
        ((Heard("a", messages.Keeping(True)), BYE_A), EndJob()),
        ((Heard("a", messages.Keeping(True)), Lost("a", "its agent died")), EndJob()),
        ((Heard("a", messages.Keeping(True)), Kill()), EndJob()),
    ],
)
def test_nodes_that_bring_their_last_files_get_time(events: Any, action: Any) -> None:
    """Unless the user wants the run to end at once."""
    assert after(*UP, FAILED, *events).on(Due(Deadline.END), 20.0) == [action]


@pytest.mark.parametrize(
    ("events", "quiet", "now", "action"),
    [
        ((), 0.5, 20.0, Arm(Deadline.END, 1.0)),
        ((), 1.5, 20.0, EndJob()),  # nothing has come since END was set
        ((), 0.5, 400.0, EndJob()),  # it never ends
        ((BYE_A,), 0.5, 20.0, Arm(Deadline.END, 1.0)),
        ((BYE_A, DIED), 0.5, 20.0, EndJob()),  # nobody is left to bring more
        ((Kill(),), 0.5, 20.0, EndJob()),
        ((Cancel("enough"),), 0.5, 20.0, Arm(Deadline.END, 1.0)),
    ],
)
def test_nodes_that_bring_the_rest_of_their_output_get_time(events: Any, quiet: float, now: float, action: Any) -> None:
    assert after(*UP, FAILED, *events).on(Due(Deadline.END, quiet), now) == [action]


@pytest.mark.parametrize("before", [UP, (*UP, FAILED)])
@pytest.mark.parametrize("event", [Cancel("enough"), Kill()])
def test_what_the_user_cancels_is_known_even_if_it_stops_for_another_reason(before: Any, event: Any) -> None:
    made = after(*before)
    assert made.wish is None
    made.on(event, 7.0)
    assert made.wish is not None


KILLED = Failure(1, 1, "host-b", "signal", "killed by SIGKILL", signal="SIGKILL", time=1.0)


@pytest.mark.parametrize(
    ("cause", "attempt", "recovery", "expected"),
    [
        (RankFailed((ERROR,)), 0, Recovery(1, "any"), True),
        (RankFailed((ERROR,)), 0, Recovery(1), False),
        (RankFailed((KILLED,)), 0, Recovery(1), True),
        (RankFailed((ERROR, KILLED)), 0, Recovery(1), False),
        (RankFailed(()), 0, Recovery(1), False),
        (None, 0, Recovery(1, "any"), True),
        (None, 0, Recovery(1), False),
        (RankFailed((KILLED,)), 1, Recovery(1), False),
        (RankFailed((KILLED,)), 0, Recovery(0), False),
        (RankFailed((replace(ERROR, kind="GroupError"),)), 0, Recovery(1, "any"), False),
        (LOST, 0, Recovery(1, "any"), False),
        (Cancelled(), 0, Recovery(1, "any"), False),
        (StartTimeout(1.0, StatusDetail("starting ranks")), 0, Recovery(1, "any"), False),
        (Stalled(1.0, Stacks({})), 0, Recovery(1), True),
        (Disagreed(""), 0, Recovery(1), True),
    ],
)
def test_when_ranks_start_again(cause: Any, attempt: int, recovery: Recovery, expected: bool) -> None:
    assert again(cause, (), attempt, recovery) is expected


def test_a_node_that_cannot_start_its_ranks_is_not_tried_again() -> None:
    lasting = Failure(-1, -1, "host-a", "StartError", "checkpoints: the folder or URL cannot be used")
    assert not again(None, [lasting], 0, Recovery(1, "any"))


def test_what_nodes_tell_at_the_end_of_an_attempt_counts() -> None:
    assert again(RankFailed(), [KILLED], 0, Recovery(1))
    assert not again(RankFailed((KILLED,)), [replace(ERROR, time=0.0)], 0, Recovery(1))


def test_ranks_are_asked_to_stop_once_they_are_up() -> None:
    made = after(HELLO_A, HELLO_B, STARTED_A, Halt())
    assert not made.stop_vote.begun
    assert made.on(STARTED_B, 2.0) == [TellNodes(Propose(1, 0)), Arm(Deadline.HALT, MARGINS.repeat)]
    assert made.on(Halt(), 3.0) == [], "it was asked already"
    assert made.on(Due(Deadline.HALT), 3.0) == [TellNodes(Propose(1, 0)), Arm(Deadline.HALT, MARGINS.repeat)]
    assert made.on(Heard("a", Reached(1, False, 4, attempt=0)), 4.0) == [TellNodes(Propose(2, 5))]
    assert made.on(Heard("a", Reached(2, True, 4, attempt=0)), 4.0) == []
    assert made.on(Heard("b", Reached(2, True, 4, attempt=0)), 4.0) == [TellNodes(Agree(2, 5))]
    assert made.on(Heard("a", Halted(0, 5, attempt=0)), 5.0) == []
    made.on(Cancel("cancelled"), 6.0)
    assert made.on(Due(Deadline.HALT), 7.0) == []


def test_a_rank_that_gets_sigterm_makes_all_stop() -> None:
    made = after(*UP)
    assert made.on(Heard("b", RankPreempted(2, attempt=0)), 2.0)[0] == TellNodes(Propose(1, 0))
    assert made.on(Heard("b", RankPreempted(3, attempt=0)), 2.0) == []
    assert made.stop_vote.preempted == "rank 2 on host-b got SIGTERM"
    assert made.wish is None


def test_ranks_that_stop_at_different_steps_are_stopped() -> None:
    made = after(*UP, Halt(), Heard("a", Halted(0, 5, attempt=0)))
    (stop, _) = made.on(Heard("b", Halted(2, 6, attempt=0)), 2.0)
    told = "rank 0 was told to stop at step 5, and rank 2 at step 6: "
    assert isinstance(stop, StopRanks) and stop.reason.startswith(told)
    assert isinstance(made.cause, Disagreed) and made.cause.message.startswith(told)


def test_a_run_goes_on_wider_when_there_is_room() -> None:
    made = after(HELLO_A, HELLO_B, STARTED_A, widths=Widths(2, 8), ranks_per_task=2)
    look = Arm(Deadline.WIDEN, MARGINS.widen)
    assert made.on(STARTED_B, 2.0) == [look, Arm(Deadline.LEAVE, MARGINS.look)]
    assert made.on(Due(Deadline.WIDEN), 3.0) == [AskRoom()]
    assert made.on(Room(0), 3.0) == [look]
    assert made.on(Room(2), 5.0)[0] == TellNodes(Propose(1, 0))
    assert made.stop_vote.preempted == "there are slots for 6 ranks instead of 4"
    assert made.stop_vote.widens
    assert made.on(Room(2), 6.0) == []


@pytest.mark.parametrize("widths", [None, Widths(2, 4)])
def test_a_run_that_is_as_wide_as_it_may_be_does_not_look(widths: Widths | None) -> None:
    begun = after(HELLO_A, HELLO_B, STARTED_A, widths=widths).on(STARTED_B, 2.0)
    assert begun == [Arm(Deadline.LEAVE, MARGINS.look)]


def test_a_stop_says_that_the_driver_cannot_listen() -> None:
    made = after(Halt())
    (told,) = made.on(Asked(Deadline.REACH, None, None, False), 2.0)
    assert isinstance(told, Warn) and "since no node reaches the driver" in told.text


def test_a_stop_says_that_not_all_nodes_are_reached() -> None:
    made = after(HELLO_A, STARTED_A)
    assert made.on(Halt(), 2.0) == [Arm(Deadline.HALT, MARGINS.unreached)]
    (told,) = made.on(Due(Deadline.HALT), 62.0)
    assert isinstance(told, Warn) and "since not all nodes reach the driver" in told.text


def test_where_ranks_have_stopped_comes_with_their_outcomes_too() -> None:
    made = after(*UP)
    assert not made.stop_vote.halted
    ended = NodeReport(0, "host-a", (Outcome(0, "host-a", "finished", halted=7),))
    made.on(Returned(Collected((ended,))), 2.0)
    assert made.stop_vote.halted


def test_an_executor_that_is_about_to_end_makes_all_stop() -> None:
    made = after(*UP)
    assert made.on(Due(Deadline.LEAVE), 2.0) == [AskLeaving()]
    assert made.on(Leaving(None), 2.0) == [Arm(Deadline.LEAVE, MARGINS.look)]
    assert made.on(Leaving("host-b"), 3.0)[0] == TellNodes(Propose(1, 0))
    assert made.stop_vote.preempted == "Spark is about to end the executor on host-b"
    assert made.on(Leaving("host-b"), 4.0) == made.on(Leaving(None), 4.0) == []


def test_a_run_that_is_asked_to_stop_does_not_widen() -> None:
    made = after(HELLO_A, HELLO_B, STARTED_A, Halt(), STARTED_B, widths=Widths(2, 8))
    made.on(Room(4), 5.0)
    assert not made.stop_vote.widens


@pytest.mark.parametrize(
    ("most", "attempt", "widens", "excused", "expected"),
    [
        (0, 0, False, 0, False),
        (1, 0, False, 0, True),
        (1, 1, False, 0, True),
        (0, 0, True, 0, True),
        (1, 1, False, 1, False),  # it has widened once, and may not start again
        (2, 1, False, 1, True),
    ],
)
def test_a_preempted_run_goes_on_if_it_may_start_again(
    most: int, attempt: int, widens: bool, excused: int, expected: bool
) -> None:
    error = PreemptionError("")
    assert again_in_new_job(error, attempt, Recovery(most), widens=widens, excused=excused) is expected


@pytest.mark.parametrize("wish", [Cancel("cancelled"), Kill()])
def test_a_cancel_counts_more_than_a_stop(wish: Any) -> None:
    assert after(*UP, Halt(), wish).wish == wish
    assert after(*UP, wish, Halt()).wish == wish


def test_a_stop_soon_says_that_no_node_is_reached() -> None:
    made = state()
    assert made.on(Halt(), 1.0) == [Arm(Deadline.REACH, 0.0)]
    asked = Asked(Deadline.REACH, None, "10.0.0.1:1", False)
    assert made.on(asked, 2.0) == [Arm(Deadline.REACH, MARGINS.look)]
    first, second = made.on(asked, 2.0 + MARGINS.look)
    assert isinstance(first, Warn) and "its tasks have run for 5 s, but no node" in first.text
    assert isinstance(second, Warn) and "cannot be asked to stop, since no node reaches the driver" in second.text
    assert made.on(Halt(), 9.0) == [second]


TOLD_RESET = Heard("b", messages.Failed(RESET, attempt=0))


def test_a_broken_connection_waits_for_the_failure_that_explains_it() -> None:
    made = after(*UP)
    assert made.on(TOLD_RESET, 2.0) == [Arm(Deadline.BLAME, MARGINS.blame)]
    assert made.on(Heard("b", messages.Failed(replace(RESET, rank=3), attempt=0)), 2.1) == []
    assert isinstance(made.phase, Running)
    assert made.on(FAILED, 2.2)[0] == StopRanks("rank 1 failed: ValueError: no")
    assert isinstance(made.cause, RankFailed)
    assert [failure.rank for failure in made.cause.failures] == [2, 3, 1]


def test_a_broken_connection_that_nothing_explains_stops_the_ranks() -> None:
    made = after(*UP, TOLD_RESET)
    assert made.on(Due(Deadline.BLAME), 3.0)[0] == StopRanks(f"rank 2 failed: {RESET.message}")
    assert made.cause == RankFailed((RESET,))
    assert made.on(Due(Deadline.BLAME), 3.0) == []


def test_a_killed_rank_explains_a_broken_connection_at_once() -> None:
    killed = Failure(0, 0, "host-a", "signal", "killed by SIGKILL", signal="SIGKILL")
    made = after(*UP, TOLD_RESET, max_restarts=1)
    assert made.on(Heard("a", messages.Failed(killed, attempt=0)), 2.0)[0] == StopRanks(
        "rank 0 failed: killed by SIGKILL", hasty=True
    )


def test_ranks_that_fail_after_a_hasty_stop_are_not_weighed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large run, thousands of ranks lose a killed one."""
    made = after(*UP, TOLD_RESET, max_restarts=1)
    killed = Failure(0, 0, "host-a", "signal", "killed by SIGKILL", signal="SIGKILL")
    first = made.on(Heard("a", messages.Failed(killed, attempt=0)), 2.0)
    monkeypatch.setattr(run_state, "surely_again", None)
    assert made.on(Heard("b", messages.Failed(replace(RESET, rank=3), attempt=0)), 2.1) == first
    made.on(Cancel("cancelled"), 2.2)
    assert isinstance(stop := made.on(FAILED, 2.3)[0], StopRanks) and not stop.hasty
    assert isinstance(made.cause, RankFailed)
    assert [failure.rank for failure in made.cause.failures] == [2, 0, 3, 1]


def test_thousands_of_ranks_that_fail_are_weighed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as no other attempt is certain, each failure is weighed once, and not with all before it."""
    weighed: list[Any] = []

    def weigh(cause: Any, *more: Any) -> bool:
        weighed.append(cause)
        return surely_again(cause, *more)

    monkeypatch.setattr(run_state, "surely_again", weigh)
    made = after(*UP, max_restarts=1)
    first, later = ([replace(RESET, rank=rank) for rank in ranks] for ranks in (range(50), range(50, 100)))
    told = [Heard("b", messages.Failed(failure, attempt=0)) for failure in (*first, *later)]
    for event in told[:50]:
        made.on(event, 2.0)
    made.on(Due(Deadline.BLAME), 3.0)
    for event in told[50:]:
        assert made.on(event, 4.0)[0] == StopRanks(f"rank 0 failed: {RESET.message}")
    assert [made.on(event, 5.0) for event in told] == [[]] * 100, "they come again after a break of the connection"
    assert made.cause == RankFailed((*first, *later))
    assert weighed == [RankFailed(tuple(first)), *(RankFailed((failure,)) for failure in later)]
    killed = Heard("a", messages.Failed(replace(KILLED, rank=100), attempt=0))
    assert made.on(killed, 6.0)[0] == StopRanks(f"rank 0 failed: {RESET.message}", hasty=True)


@pytest.mark.parametrize("kind", ["ValueError", "GroupError"])
def test_a_failure_that_may_end_the_run_keeps_what_follows_from_being_certain(kind: str) -> None:
    recovery = {"max_restarts": 1, "restart_on": "any"} if kind == "GroupError" else {"max_restarts": 1}
    made = after(*UP, Heard("a", messages.Failed(replace(ERROR, kind=kind), attempt=0)), **recovery)
    for event in (Heard("b", messages.Failed(replace(KILLED, rank=2), attempt=0)), DIED):
        assert isinstance(stop := made.on(event, 2.0)[0], StopRanks) and not stop.hasty


def test_a_lost_node_explains_a_broken_connection() -> None:
    made = after(*UP, TOLD_RESET)
    made.on(Lost("a", "its agent died"), 2.0)
    assert isinstance(made.cause, NodeLost) and made.cause.failures == (RESET,)


def test_a_node_that_gets_sigterm_preempts_the_run() -> None:
    made = after(*UP)
    assert made.on(Heard("b", RankPreempted(attempt=0)), 2.0)[0] == TellNodes(Propose(1, 0))
    assert made.stop_vote.preempted == "the node on host-b (node 1, ranks 2-3) got SIGTERM"


def test_a_driver_that_gets_sigterm_lets_ranks_save_for_the_grace_period() -> None:
    made = after(*UP, max_restarts=1)
    assert made.on(DriverTerminated(), 2.0) == [TellNodes(messages.Terminate()), Arm(Deadline.TERMINATE, 10.0)]
    assert made.wish == Halt()
    assert made.on(Due(Deadline.TERMINATE), 12.0)[0] == StopRanks("terminated")
    assert isinstance(after(HELLO_A, DriverTerminated()).cause, Cancelled)
