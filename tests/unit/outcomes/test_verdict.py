"""Whether a run has values or an exception, and which: one function decides."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from distributor import errors
from distributor.outcomes import driver_failures
from distributor.outcomes.causes import (
    Cancelled,
    Disagreed,
    NodeLost,
    Preempted,
    RankFailed,
    Stalled,
    StartTimeout,
    Unfit,
)
from distributor.outcomes.driver_failures import Loss
from distributor.outcomes.stacks import Stacks
from distributor.outcomes.verdict import Verdict, verdict
from distributor.values.job import Status, StatusDetail
from distributor.values.outcome import Collected, Failure, NodeReport, Outcome

ERROR = Failure(1, 1, "host-a", "ValueError", "ValueError: no")
RESET = Failure(0, 0, "host-b", "RuntimeError", "RuntimeError: Connection reset by peer")
LOST = NodeLost(("host-b",))
BROKEN = RuntimeError("no such thread")
ENDED_BY_US = errors.RunCancelledError("by us")


def report(*outcomes: Outcome, error: tuple[str, str] | None = None) -> Collected:
    return Collected((NodeReport(0, "host-a", outcomes, error),), {0: [pickle.dumps(42)]})


def passed(collected: Collected) -> Collected:
    return replace(collected, reports=tuple(replace(each, passed=True) for each in collected.reports))


ENDED = report(Outcome(0, "host-a", "finished"), Outcome(1, "host-a", "finished"))
FINE = passed(ENDED)
STOPPED = report(Outcome(0, "host-a", "stopped"), Outcome(1, "host-a", "stopped"))
FAILED = report(Outcome(0, "host-a", "stopped"), Outcome(1, "host-a", "failed", ERROR))
ECHOED = report(Outcome(0, "host-a", "failed", RESET), Outcome(1, "host-a", "stopped"))
BEREFT = report(error=("CompanionError", "the companion store on host-a exited with code 3"))
UNPREPARED = Collected((*BEREFT.reports, NodeReport(-1, "host-b", error=("StartError", "data 'a': host-b does not"))))
UNFIT = report(error=("ResourceError", "there are 2 GPUs"))


def decide(cause: Any, collected: Collected | None, error: BaseException | None = None) -> Verdict:
    return verdict(cause, collected, error, label="3f2a", world_size=2)


@pytest.mark.parametrize(
    ("cause", "collected", "error", "kind", "text"),
    [
        (Cancelled(), FINE, None, errors.RunCancelledError, "run 3f2a was cancelled"),  # ranks may end with 0 meanwhile
        (Cancelled(), FAILED, None, errors.RunCancelledError, "run 3f2a was cancelled"),
        (Cancelled(), None, BROKEN, errors.RunCancelledError, "run 3f2a was cancelled"),
        (
            Stalled(5.0, Stacks({0: "it hangs"})),
            STOPPED,
            None,
            errors.StallError,
            "stall_timeout=5 s: rank 0: it hangs",
        ),
        (
            StartTimeout(60.0, StatusDetail("starting ranks")),
            None,
            BROKEN,
            errors.StartError,
            "60 s: it was starting ranks",
        ),
        # Why a node could not be prepared explains that others waited for it.
        (StartTimeout(60.0, StatusDetail("starting ranks")), UNPREPARED, None, errors.StartError, "host-b does not"),
        (StartTimeout(60.0, StatusDetail("starting ranks")), BEREFT, None, errors.StartError, "was starting ranks"),
        (RankFailed(), UNPREPARED, None, errors.StartError, "host-b does not"),
        (None, FAILED, None, errors.TrainingError, "rank 1 on host-a failed: ValueError: no"),
        (None, UNFIT, None, errors.ResourceError, "there are 2 GPUs"),
        (
            Unfit("host-b", "full"),
            None,
            BROKEN,
            errors.StartError,
            "the temporary folder on host-b cannot be used (full)",
        ),
        (LOST, STOPPED, None, errors.NodeLostError, "lost the node on host-b"),
        (LOST, ENDED, None, errors.NodeLostError, "lost the node on host-b"),  # they were stopped, and ended with 0
        (LOST, replace(FINE, lost_hosts=("host-b",)), None, errors.NodeLostError, "lost the node on host-b"),
        (None, STOPPED, None, errors.NodeLostError, "ranks 0-1 were stopped before they finished"),
        (None, None, BROKEN, errors.StartError, "RuntimeError: no such thread"),
        (None, None, SystemExit(3), errors.StartError, "SystemExit: 3"),
        (RankFailed((ERROR,)), FAILED, None, errors.TrainingError, "ValueError: no"),
        (RankFailed((ERROR,)), None, BROKEN, errors.TrainingError, "ValueError: no"),
        (RankFailed(), None, BROKEN, errors.StartError, "no such thread"),
        (RankFailed((RESET,)), None, BROKEN, errors.StartError, "no such thread"),
        (RankFailed((ERROR,)), None, errors.StartError("no torch"), errors.StartError, "no torch"),
        (RankFailed((RESET,)), BEREFT, None, errors.CompanionError, "the companion store"),
        (LOST, FAILED, None, errors.TrainingError, "ValueError: no"),  # the failure is the cause of the loss
        (LOST, ECHOED, None, errors.NodeLostError, "lost the node on host-b"),  # and this one its consequence
        (LOST, STOPPED, None, errors.NodeLostError, "lost the node on host-b"),
        (NodeLost(("host-b",), (ERROR,)), None, ENDED_BY_US, errors.TrainingError, "ValueError: no"),
        (NodeLost(("host-b",), (RESET,)), None, ENDED_BY_US, errors.NodeLostError, "lost the node on host-b"),
        # The driver itself fails: it loses its nodes too. A rank that had failed before explains more.
        (LOST, None, BROKEN, errors.StartError, "RuntimeError: no such thread"),
        (NodeLost(("host-b",), (RESET,)), None, BROKEN, errors.StartError, "RuntimeError: no such thread"),
        (NodeLost(("host-b",), (ERROR,)), None, BROKEN, errors.TrainingError, "ValueError: no"),
        (RankFailed((ERROR,)), None, errors.RunCancelledError("by Spark"), errors.TrainingError, "ValueError: no"),
        (None, None, errors.RunCancelledError("by Spark"), errors.RunCancelledError, "by Spark"),
        # What nodes ran on has ended: their loss explains no more. A rank that had failed before does.
        (
            LOST,
            None,
            driver_failures.context_stopped("3f2a", True),
            errors.RunCancelledError,
            "stopped by spark.stop()",
        ),
        (LOST, None, driver_failures.jvm_ended("3f2a"), errors.StartError, "Spark's JVM on the driver ended"),
        (LOST, None, ENDED_BY_US, errors.NodeLostError, "lost the node on host-b"),
        (RankFailed((ERROR,)), None, driver_failures.jvm_ended("3f2a"), errors.TrainingError, "ValueError: no"),
    ],
)
def test_the_error(
    cause: Any, collected: Collected | None, error: BaseException | None, kind: type[BaseException], text: str
) -> None:
    decided = decide(cause, collected, error)
    assert type(decided.error) is kind
    assert text in str(decided.error)
    assert decided.values == {}
    cancelled = kind is errors.RunCancelledError
    assert decided.status is (Status.CANCELLED if cancelled else Status.FAILED)


def test_a_lost_node_says_why_spark_lost_it() -> None:
    """A guess at the cause is made only where nothing explains it."""
    said = "ExecutorLostFailure (executor 0 exited) Reason: Command exited with code 57"
    for loss, guesses in ((Loss(said), True), (Loss(said, "a.b is 1s: Spark ends executors. Raise a.b"), False)):
        told = str(decide(LOST, None, driver_failures.explained(errors.RunCancelledError("by us"), loss)).error)
        assert told.startswith(f"lost the node on host-b. Spark says: {said}. ")
        assert told.endswith(loss.explanation)
        assert ("out of memory" in told) is guesses


@pytest.mark.parametrize(
    ("cause", "collected"), [(LOST, STOPPED), (LOST, None), (None, STOPPED), (None, Collected(lost_hosts=("host-b",)))]
)
def test_local_mode_does_not_speak_of_spark(cause: Any, collected: Collected | None) -> None:
    told = verdict(cause, collected, ENDED_BY_US, label="3f2a", world_size=2, local=True).error
    assert isinstance(told, errors.NodeLostError)
    assert not any(word in str(told) for word in ("Spark", "executor", "worker"))
    assert "executor" in str(decide(cause, collected, ENDED_BY_US).error)


def test_an_error_passes_on_no_escape_sequence_but_colours() -> None:
    strange = "\x1b]0;title\x07\x1b[31mno\x1b[2K"
    failure = Failure(1, 1, "host-a", "ValueError", strange, traceback=strange, log_tail=strange)
    for collected in (
        report(Outcome(1, "host-a", "failed", failure)),
        report(error=("CompanionError", strange)),
        report(Outcome(0, "host-a", "unreturned", failure), Outcome(1, "host-a", "finished")),
        Collected(lost_hosts=(strange,)),
    ):
        told = str(decide(None, collected).error)
        assert "\x1b[31mno" in told
        assert "title" not in told and "\x1b[2K" not in told


def test_values() -> None:
    decided = decide(None, FINE)
    assert (decided.values, decided.error, decided.status) == ({0: 42}, None, Status.SUCCEEDED)


def test_a_node_lost_after_all_results_arrived_fails_no_run() -> None:
    assert decide(LOST, FINE) == Verdict({0: 42})
    one = replace(FINE.reports[0], outcomes=(Outcome(0, "host-a", "unreturned"),))
    other = replace(one, node_rank=1, outcomes=(Outcome(1, "host-a", "finished"),), passed=False)
    assert isinstance(decide(LOST, Collected((one, other), FINE.values)).error, errors.NodeLostError)


HALTED = passed(report(Outcome(0, "host-a", "finished", halted=7), Outcome(1, "host-a", "finished", halted=7)))
APART = passed(report(Outcome(0, "host-a", "finished", halted=7), Outcome(1, "host-a", "finished", halted=8)))
PREEMPTED = Preempted("rank 1 on host-a got SIGTERM", "There is no checkpoint")


@pytest.mark.parametrize(
    ("preempted", "collected", "expected"),
    [
        (None, HALTED, None),
        (PREEMPTED, FINE, None),  # it was over before anybody could stop it
        (
            PREEMPTED,
            HALTED,
            errors.PreemptionError(
                "the run was preempted: rank 1 on host-a got SIGTERM, and all ranks have stopped at step 7. There is "
                "no checkpoint"
            ),
        ),
        *(
            (
                preempted,
                APART,
                errors.StopError(
                    "rank 0 was told to stop at step 7, and rank 1 at step 8: call should_stop() with the same "
                    "steps on all ranks"
                ),
            )
            for preempted in (None, PREEMPTED)
        ),
    ],
)
def test_ranks_that_were_told_to_stop(
    preempted: Preempted | None, collected: Collected, expected: BaseException | None
) -> None:
    error = verdict(None, collected, None, label="3f2a", world_size=2, preempted=preempted).error
    assert repr(error) == repr(expected)
    lost = verdict(LOST, collected, None, label="3f2a", world_size=2, preempted=preempted).error
    assert repr(lost) == repr(expected), "the node has ended after its ranks"


def test_ranks_that_disagree_while_they_run() -> None:
    assert repr(decide(Disagreed("apart"), STOPPED).error) == "StopError('apart')"
