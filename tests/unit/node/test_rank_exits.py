"""What becomes of a rank, from how its process ended and what it wrote."""

from __future__ import annotations

import errno
import re
from dataclasses import replace
from typing import Any

import pytest

from distributor import errors
from distributor.node import rank_exits
from distributor.node.rank_exits import Ends, Now
from distributor.values import messages
from distributor.values.job import Function, Module, Target
from distributor.values.messages import RankExited
from distributor.values.outcome import Ending, Failure, Outcome
from distributor.values.placement import Node, Placement
from distributor.values.plan import NodeOrder, Plan

NODE = Node(1, "host-b:1", "host-b", "10.0.0.2", 4000, leader=2, first_rank=2, local_world_size=2)
RAISED = Failure(3, 1, "host-b", "ValueError", "ValueError: no", "File /tmp/n/script/t.py", exit_code=1, time=5.0)
FAILED = Outcome(3, "host-b", "failed", RAISED)
FINISHED = Outcome(3, "host-b", "finished", called=1.0, returned=2.0)


def order(target: Target = Function("train", b""), serving: tuple[int, ...] = ()) -> NodeOrder:
    plan: Any = Plan(NODE, target, {}, ({}, {}), serving=serving)
    return NodeOrder(
        "3f2a",
        plan,
        Placement((NODE,)).shares(whole=False)[0],
        1.0,
        1.0,
        None,
        -1,
        "/",
        None,
        (),
        False,
        "fork",
        "/",
        {},
    )


#: Now, at 1,000 s since the epoch.
NOW = Now(1000.0, 10.0)


def ended(
    code: int | None, *, by_us: float | None = None, early: bool = False, stopped: bool = False, **more: Any
) -> Ends:
    """A rank that ended 3 s ago; ``by_us``: when it was told to stop."""
    exits = {} if code is None else {1: RankExited(1, code, by_us, 7.0, early=early)}
    return Ends(exits, stopped, **{"now": NOW, **more})


def outcome(
    told: Outcome | None, ends: Ends, target: Target = Function("train", b""), *, moment: float = 5.0
) -> Outcome:
    """The outcome of a rank that told of it 5 s ago."""
    return rank_exits.outcome_of(order(target), 1, None if told is None else Ending(told, moment), ends)


def test_a_rank_that_returned_has_the_outcome_that_it_wrote() -> None:
    assert outcome(FINISHED, ended(0)) == FINISHED


def test_a_module_that_ends_with_0_needs_no_outcome() -> None:
    assert outcome(None, ended(0), Module("train")) == Outcome(3, "host-b", "finished")


@pytest.mark.parametrize(
    ("told", "released", "state"),
    [
        (None, 4.0, "finished"),
        (FAILED, 4.0, "finished"),
        (FINISHED, 4.0, "finished"),
        (None, None, "failed"),
        (FAILED, None, "failed"),
        (FAILED, 6.0, "failed"),
    ],
)
def test_a_rank_that_has_served_is_finished(told: Outcome | None, released: float | None, state: str) -> None:
    """Whatever it says after it was told to end; the launcher reports its end as 0. It speaks at 5 s."""
    ending = None if told is None else Ending(told, 5.0)
    exit = RankExited(1, 0, None, 7.0, released)
    exit = replace(exit, early=released is None and rank_exits.leaves_early(Function("train", b""), ending))
    made = rank_exits.outcome_of(order(serving=(3,)), 1, ending, Ends({1: exit}, now=NOW))
    assert (made.state, made.failure is None) == (state, state == "finished")


def test_a_function_that_ends_with_0_before_it_returned_has_failed() -> None:
    failure = outcome(None, ended(0, early=True)).failure
    assert failure is not None
    assert (failure.exit_code, failure.time) == (0, 997.0)
    assert failure.message.startswith("exited with code 0 before the function returned")


@pytest.mark.parametrize(("ends", "told"), [(ended(-15, by_us=6.0), None), (ended(None, stopped=True), None)])
def test_a_rank_that_we_stopped_is_stopped(ends: Ends, told: Outcome | None) -> None:
    assert outcome(told, ends) == Outcome(3, "host-b", "stopped")


@pytest.mark.parametrize(
    ("target", "told", "early"),
    [
        (Function("train", b""), None, True),
        (Function("train", b""), FINISHED, False),
        (Module("train"), None, False),
        (Module("train"), FAILED, True),
    ],
)
def test_whether_code_0_is_a_success(target: Target, told: Outcome | None, early: bool) -> None:
    assert rank_exits.leaves_early(target, None if told is None else Ending(told, 5.0)) is early


def test_a_rank_that_was_stopped_after_it_returned_is_finished() -> None:
    assert outcome(FINISHED, ended(-15, by_us=6.0)) == FINISHED


def test_a_failure_stays_the_reason_when_its_rank_is_stopped_on_its_way_out() -> None:
    found = outcome(FAILED, ended(-9, by_us=6.0))
    assert (found.state, found.failure) == ("failed", replace(RAISED, time=995.0))


@pytest.mark.parametrize(
    ("code", "kind", "exit_code", "signal"), [(3, "exit", 3, None), (-9, "signal", None, "SIGKILL")]
)
def test_an_end_without_a_word_is_described(code: int, kind: str, exit_code: int | None, signal: str | None) -> None:
    failure = outcome(None, ended(code, tails={3: b"the end"})).failure
    assert failure is not None
    assert (failure.kind, failure.exit_code, failure.signal, failure.log_tail) == (kind, exit_code, signal, "the end")


def test_a_rank_whose_launcher_went_down_is_lost() -> None:
    failure = outcome(None, ended(None)).failure
    assert failure is not None
    assert (failure.kind, failure.time) == ("lost", 1000.0)


def test_paths_of_shipped_files_are_those_on_the_driver() -> None:
    failure = outcome(FAILED, ended(1, shipped=[("/tmp/n/script/t.py", "/home/t.py")])).failure
    assert failure is not None
    assert failure.traceback == "File /home/t.py"


def test_a_node_that_stopped_tells_ever_less() -> None:
    failed = replace(FAILED, failure=replace(RAISED, exception=b"pickle", log_tail="the end"))
    told = rank_exits.stopped(0, 4000, (FINISHED, failed), None)
    assert [each.port for each in told] == [4000] * 3
    assert [each.outcomes[0] for each in told] == [FINISHED] * 3
    assert [each.outcomes[1].failure for each in told] == [
        replace(RAISED, log_tail="the end"),
        replace(RAISED, traceback=""),
        None,
    ]
    for each in told:
        assert messages.decode(messages.encode(each)) == each


def test_an_outcome_in_another_state_is_no_message() -> None:
    wrong = messages.encode(rank_exits.stopped(0, 4000, (FINISHED,), None)[0])
    wrong["outcomes"][0]["state"] = "unheard of"
    with pytest.raises(ValueError, match="Outcome.state: 'unheard of' is not of type"):
        messages.decode(wrong)


def test_errors_of_the_package_are_told_as_they_are() -> None:
    assert rank_exits.explain(errors.ResourceError("no GPU"), "/tmp/n") == ("ResourceError", "no GPU")
    kind, text = rank_exits.explain(KeyError("x"), "/tmp/n")
    assert kind == "StartError"
    assert "failed: KeyError: 'x'" in text


@pytest.mark.parametrize(
    ("moment", "stopped", "time", "after"),
    [
        pytest.param(5.0, 6.0, 995.0, False, id="before-it-was-told"),
        pytest.param(6.5, 6.0, 996.5, True, id="because-it-was-told"),
        pytest.param(5.0, None, 995.0, False, id="never-told"),
        pytest.param(5000.0, 6.0, 997.0, True, id="a-clock-that-is-ahead"),
        pytest.param(-5000.0, None, 997.0, False, id="a-clock-that-is-behind"),
    ],
)
def test_when_a_rank_failed(moment: float, stopped: float | None, time: float, after: bool) -> None:
    """By one clock, whatever the rank's own says; a rank cannot fail after its end."""
    failure = outcome(FAILED, ended(1, by_us=stopped), moment=moment).failure
    assert failure is not None
    assert (failure.time, failure.after_stop) == (time, after)


def test_a_rank_that_is_stopped_before_it_can_say_why_it_failed_is_stopped() -> None:
    """It may only have noticed that another rank had gone."""
    cut = Ending(FAILED, 5.0, known="type")
    assert rank_exits.outcome_of(order(), 1, cut, ended(-15, by_us=6.0)) == Outcome(3, "host-b", "stopped")
    assert rank_exits.outcome_of(order(), 1, cut, ended(-9)).state == "failed"


def test_a_full_disk_is_named() -> None:
    failure = outcome(None, ended(3, full="/tmp/n")).failure
    assert failure is not None
    assert failure.message == "exited with code 3. The disk of /tmp/n on host-b is full"
    kind, text = rank_exits.explain(OSError(errno.ENOSPC, "No space left on device"), "/tmp/n")
    assert kind == "StartError"
    assert text.startswith("the disk of /tmp/n on ")


def test_too_many_open_files_are_no_traceback() -> None:
    kind, text = rank_exits.explain(OSError(errno.EMFILE, "Too many open files"), "/tmp/n")
    assert kind == "StartError"
    assert re.fullmatch(r"the agent on \S+ has too many open files: raise ulimit -n of .* local mode", text)


def test_the_first_exceptions_of_a_node_are_kept() -> None:
    def failed(rank: int, time: float) -> Outcome:
        return Outcome(rank, "host-b", "failed", replace(RAISED, rank=rank, time=time, exception=bytes(4)))

    kept = rank_exits.within((failed(0, 3.0), FINISHED, failed(1, 1.0), failed(2, 2.0)), 9)
    assert [each.failure and each.failure.exception for each in kept] == [None, None, bytes(4), bytes(4)]


EXITED = Outcome(3, "host-b", "failed", replace(RAISED, kind="exit", message="exited with code 143", traceback=""))


@pytest.mark.parametrize(("moment", "state"), [(5.0, "failed"), (6.5, "stopped")])
def test_a_handler_of_sigterm_may_call_sys_exit(moment: float, state: str) -> None:
    assert outcome(EXITED, ended(143, by_us=6.0), moment=moment).state == state


@pytest.mark.parametrize(
    ("message", "tail"), [("MemoryError", b""), ("killed by SIGABRT", b"OpenBLAS error: Memory allocation")]
)
def test_a_limit_on_memory_explains_a_failure(message: str, tail: bytes) -> None:
    ends = ended(1, limit="limits the address space", tails={3: tail})
    told = outcome(replace(FAILED, failure=replace(RAISED, message=message)), ends).failure
    other = outcome(FAILED, ends).failure
    assert told is not None and told.message == f"{message}. The node limits the address space"
    assert other is not None and (tail or other.message == RAISED.message)
